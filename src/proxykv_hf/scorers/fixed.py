"""Scores given beforehand: the fake for tests, and a way in for scores from elsewhere."""

from __future__ import annotations

from torch import Tensor

from .base import ScorerRun, ScoringRequest, WholeCache


class FixedScorer:
    """Returns ``scores`` `[R, L, H, N]` as they are; the cache checks them, not this class.

    R are the prompt's distinct rows in order of appearance, L every decoder layer, N the columns of
    the left-padded prompt.
    """

    name = "fixed"
    observes = False

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Nothing to do before `finish`."""
        return _FixedRun(self.scores)


class _FixedRun(ScorerRun):
    needs_cache = False

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = scores

    def ready(self) -> bool:
        return True

    def finish(self, cache: WholeCache) -> Tensor:
        return self.scores
