"""A run that turns what it is shown of the prefill into something small at once, and keeps only that."""

from __future__ import annotations

from typing import Generic, TypeVar

from .base import Observation, ScorerRun, ScoringRequest

T = TypeVar("T")


class ObservingRun(ScorerRun, Generic[T]):
    """Passes the rows' own tokens to `fold`, without padding and drafts.

    Batch rows that are copies of each other are folded once, until a chunk makes them differ. Tokens that are cropped
    before the prompt is scored stay folded in.

    Args:
        request: The request that `Scorer.begin` was given.
    """

    def __init__(self, request: ScoringRequest) -> None:
        super().__init__()
        self._first_columns = request.prompt.columns  # the prompt's in the first forward; drafts follow
        self._folded: dict[tuple[int, int], T] = {}  # by layer, and by the first batch row of several copies
        self._firsts: dict[int, tuple[int, ...]] = {}  # by layer, `Observation.firsts` of the last forward

    def observe(self, observation: Observation) -> None:
        layer, batch = observation.layer, len(observation.query)
        first = observation.columns - observation.query.shape[2]
        stop = observation.columns if first else self._first_columns
        pads, firsts = observation.pads or (0,) * batch, observation.firsts or tuple(range(batch))
        before = self._firsts.get(layer, firsts)
        self._firsts[layer] = firsts
        # A row that was a copy of another row until now continues from what both have in common.
        common = {row: self._folded.get((layer, before[row])) for row in dict.fromkeys(firsts)}
        for row, folded in common.items():
            start = max(first, pads[row])
            if start < stop:
                folded = self.fold(observation, row, pads[row], start, stop, folded)
            if folded is not None:
                self._folded[layer, row] = folded

    def folded(self, layer: int, row: int) -> T | None:
        """What `fold` returned last for a batch row in a layer; None if it was not called."""
        return self._folded.get((layer, self._firsts[layer][row]))

    def cancel(self) -> None:
        self._folded.clear()

    def fold(self, observation: Observation, row: int, pad: int, start: int, stop: int, before: T | None) -> T | None:
        """Fold the new columns of one batch row into the result so far.

        Args:
            observation: The observation of all batch rows.
            row: The batch row.
            pad: The row's first column after its padding.
            start: The row's first new column.
            stop: The column after the row's last new column.
            before: What this method returned for the row's earlier columns; None for the first ones. Other rows may
                share it, so it must not be changed.

        Returns: the result for all columns of the row so far.
        """
        raise NotImplementedError
