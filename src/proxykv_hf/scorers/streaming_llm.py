"""StreamingLLM (arXiv 2309.17453): attention sinks and the most recent tokens, for every text."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import InvalidInputError
from .base import ScorerRun, ScoringRequest, WholeCache


class StreamingLLMScorer:
    """Scores a token by its position: minus the distance to the row's end, and infinity for the row's first tokens.

    It needs no forward.

    Args:
        sink_tokens: The number of first tokens of a row that are kept before all others.

    Raises:
        InvalidInputError: ``sink_tokens`` is less than 0.
    """

    name = "streaming_llm"
    observes = False

    def __init__(self, sink_tokens: int = 4) -> None:
        if sink_tokens < 0:
            raise InvalidInputError(f"sink_tokens: expected at least 0, got {sink_tokens}")
        self.sink_tokens = sink_tokens

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Return a run that computes the scores in `finish`."""
        return _StreamingLLMRun(self.sink_tokens)


class _StreamingLLMRun(ScorerRun):
    needs_cache = False

    def __init__(self, sink_tokens: int) -> None:
        super().__init__()
        self.sink_tokens = sink_tokens

    def ready(self) -> bool:
        return True

    def finish(self, cache: WholeCache) -> Tensor:
        prompt, scores = cache.request.prompt, cache.request.blank_scores()
        scores += torch.arange(-prompt.columns, 0, device=scores.device)  # minus the distance to the end
        for row, pad in enumerate(prompt.pads):
            scores[row, :, :, pad : pad + self.sink_tokens] = math.inf
        return scores
