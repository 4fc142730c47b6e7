"""StreamingLLM (arXiv 2309.17453): attention sinks and the most recent tokens, whatever the text says."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import InvalidInputError
from .base import ScorerRun, ScoringRequest, WholeCache


class StreamingLLMScorer:
    """Minus the distance from the end of the row, and infinity for its first tokens; no model is asked.

    Args:
        sink_tokens: First tokens of a row that are kept before all others.
    """

    name = "streaming_llm"
    observes = False

    def __init__(self, sink_tokens: int = 4) -> None:
        if sink_tokens < 0:
            raise InvalidInputError(f"sink_tokens: expected at least 0, got {sink_tokens}")
        self.sink_tokens = sink_tokens

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Nothing to launch."""
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
