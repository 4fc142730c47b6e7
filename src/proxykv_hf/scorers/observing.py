"""A run that makes something small, at once, of what it is shown of the prefill."""

from __future__ import annotations

from typing import Generic, TypeVar

from .base import Observation, ScorerRun, ScoringRequest

T = TypeVar("T")


class ObservingRun(ScorerRun, Generic[T]):
    """Cuts what it is shown to the rows' own tokens, so that `fold` sees neither padding nor drafts.

    Batch rows that are copies of one another are folded once, until a chunk tells them apart. Tokens that are cropped
    again before the prompt is scored have been folded in.

    Args:
        request: What is to be scored, as `Scorer.begin` is given it.
    """

    def __init__(self, request: ScoringRequest) -> None:
        super().__init__()
        self._first_columns = request.prompt.columns  # of the first forward; drafts, in assisted decoding, follow
        self._folded: dict[tuple[int, int], T] = {}  # by layer and batch row, the first of its copies
        self._firsts: dict[int, tuple[int, ...]] = {}  # by layer, `Observation.firsts` of its latest forward

    def observe(self, observation: Observation) -> None:
        layer, batch = observation.layer, len(observation.query)
        first = observation.columns - observation.query.shape[2]
        stop = observation.columns if first else self._first_columns
        pads, firsts = observation.pads or (0,) * batch, observation.firsts or tuple(range(batch))
        before = self._firsts.get(layer, firsts)
        self._firsts[layer] = firsts
        # A row that was another's copy until now goes on from what both have in common.
        common = {row: self._folded.get((layer, before[row])) for row in dict.fromkeys(firsts)}
        for row, folded in common.items():
            start = max(first, pads[row])
            if start < stop:
                folded = self.fold(observation, row, pads[row], start, stop, folded)
            if folded is not None:
                self._folded[layer, row] = folded

    def folded(self, layer: int, row: int) -> T | None:
        """What became of a batch row in a layer, if anything."""
        return self._folded.get((layer, self._firsts[layer][row]))

    def cancel(self) -> None:
        self._folded.clear()

    def fold(self, observation: Observation, row: int, pad: int, start: int, stop: int, before: T | None) -> T | None:
        """Take in one row of the batch.

        Args:
            observation: Of all rows.
            row: Its number in the batch.
            pad: Its first own column.
            start: The first of its columns that are new.
            stop: The column after the last of them.
            before: What this returned of its columns until now. Other rows may share it: it is not to be changed.
        """
        raise NotImplementedError
