"""Each head's mean training score, the same for every text.

This follows KVzip's context-independent mode (arXiv 2505.23416), which takes the largest score of each head, and keeps
sink and recent tokens in a weak head. Here a weak head keeps at least one token, as with every other scorer.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import GeometryError
from .base import ScorerRun, ScoringRequest, WholeCache


class HeadPriorScorer:
    """Gives every token of a head the same score. It needs no forward.

    Args:
        prior: `[L, H]`, the score of each head; heads with higher scores keep more. `HybridAxialMapper.head_prior`
            returns one.
    """

    name = "head_prior"
    observes = False

    def __init__(self, prior: Tensor) -> None:
        self.prior = prior

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Check the prior. There is no other work before `finish`.

        Raises:
            GeometryError: The prior is for another target.
        """
        expected = (request.geometry.num_layers, request.geometry.num_key_value_heads)
        if tuple(self.prior.shape) != expected:
            raise GeometryError(f"expected a prior [L, H] = {[*expected]}, got {[*self.prior.shape]}")
        return _HeadPriorRun(self.prior)


class _HeadPriorRun(ScorerRun):
    needs_cache = False

    def __init__(self, prior: Tensor) -> None:
        super().__init__()
        self.prior = prior

    def ready(self) -> bool:
        return True

    def finish(self, cache: WholeCache) -> Tensor:
        scores = cache.request.blank_scores()
        return scores + self.prior.to(scores.device)[:, :, None]
