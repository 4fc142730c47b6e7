"""A run that makes something small, at once, of what it is shown of the prefill."""

from __future__ import annotations

from .base import Observation, ScorerRun, ScoringRequest


class ObservingRun(ScorerRun):
    """Cuts what it is shown to the rows' own tokens, so that `fold` sees neither padding nor drafts.

    Tokens that are cropped again before the prompt is scored have been folded in.

    Args:
        request: What is to be scored, as `Scorer.begin` is given it.
    """

    def __init__(self, request: ScoringRequest) -> None:
        super().__init__()
        self._first_columns = request.prompt.columns  # of the first forward; drafts, in assisted decoding, follow

    def observe(self, observation: Observation) -> None:
        first = observation.columns - observation.query.shape[2]
        stop = observation.columns if first else self._first_columns
        for row, pad in enumerate(observation.pads or (0,) * len(observation.query)):
            start = max(first, pad)
            if start < stop:
                self.fold(observation, row, pad, start, stop)

    def fold(self, observation: Observation, row: int, pad: int, start: int, stop: int) -> None:
        """Take in one row of the batch.

        Args:
            observation: Of all rows.
            row: Its number in the batch.
            pad: Its first own column.
            start: The first of its columns that are new.
            stop: The column after the last of them.
        """
        raise NotImplementedError
