"""Scores that are given beforehand: for tests, and for scores that were computed elsewhere."""

from __future__ import annotations

from torch import Tensor

from .base import ScorerRun, ScoringRequest, WholeCache


class FixedScorer:
    """Returns the scores that it was given. The cache checks them.

    Args:
        scores: `[R, L, H, N]`: the prompt's R distinct rows in order of first appearance, all L decoder layers, H KV
            heads, and the N columns of the left-padded prompt.
    """

    name = "fixed"
    observes = False

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Return a run that returns the given scores."""
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
