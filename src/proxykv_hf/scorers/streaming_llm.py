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
        prompt, geometry = cache.request.prompt, cache.request.geometry
        distance = torch.arange(prompt.columns, 0, -1, dtype=torch.float32, device=cache.target.device)
        scores = -distance.repeat(len(prompt.lengths), 1)  # [R, P]
        for row, pad in enumerate(prompt.pads):
            scores[row, pad : pad + self.sink_tokens] = math.inf
        heads = (geometry.num_layers, geometry.num_key_value_heads)
        return scores[:, None, None].expand(-1, *heads, -1)
