"""Each head's mean training score, blind to the text.

In the spirit of KVzip's context-independent mode (arXiv 2505.23416), which takes the largest score of each head and
leaves a weak one sinks and recent tokens; here weak heads keep one token, as those of every other method may.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import GeometryError
from .base import ScorerRun, ScoringRequest, WholeCache


class HeadPriorScorer:
    """The same score for every token of a head; needs no pass at all.

    Args:
        prior: `[L, H]`, higher is kept; `HybridAxialMapper.head_prior` has one.
    """

    name = "head_prior"
    observes = False

    def __init__(self, prior: Tensor) -> None:
        self.prior = prior

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Nothing to launch.

        Raises:
            GeometryError: The prior is of another target.
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
