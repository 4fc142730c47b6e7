"""Random scores, which every scorer must beat."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from .base import ScorerRun, ScoringRequest, WholeCache


class RandomScorer:
    """Gives random scores, uniform in [0, 1). They depend only on the row's tokens and the seed, not on the batch.

    Args:
        seed: The seed of the random numbers.
    """

    name = "random"
    observes = False

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Return a run that draws the scores in `finish`."""
        return _RandomRun(self.seed)


class _RandomRun(ScorerRun):
    needs_cache = False

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def ready(self) -> bool:
        return True

    def finish(self, cache: WholeCache) -> Tensor:
        prompt, scores = cache.request.prompt, cache.request.blank_scores()
        for row, (pad, length) in enumerate(zip(prompt.pads, prompt.lengths, strict=True)):
            ids = b"" if prompt.input_ids is None else prompt.row_ids(row).to(torch.int64).numpy().tobytes()
            generator = torch.Generator().manual_seed(zlib.crc32(ids, self.seed & 0xFFFFFFFF))
            scores[row, :, :, pad:] = torch.rand(*scores.shape[1:3], length, generator=generator, dtype=torch.float32)
        return scores
