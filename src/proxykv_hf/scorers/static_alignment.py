"""KVzip+IAM: the proxy's own KVzip scores, carried layer to layer by a fixed map (arXiv 2507.11953)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from .._compat import call_forward
from ..errors import InvalidInputError
from ..geometry import ModelGeometry
from ..reconstruction import reconstruction_scores
from .base import ScoringRequest
from .on_lane import LaneScorer, LaneUse


class StaticAlignmentScorer(LaneScorer):
    """What a trained mapper has to beat: no training, and nothing that depends on the text but the proxy.

    Args:
        proxy: The whole proxy, a decoder without language-model head.
        tokenizer: The proxy's.
        layer_map: For each of the target's layers the proxy's; by default in proportion to depth.
        threads: CPU threads of the lane.
    """

    name = "static_alignment"
    repeats = True

    def __init__(
        self,
        proxy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        layer_map: Sequence[int] | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__(proxy, tokenizer, threads)
        self.layer_map = layer_map

    def score_row(
        self,
        input_ids: Tensor,
        context: tuple[int, int],
        request: ScoringRequest,
        use: LaneUse,
        cancelled: Callable[[], bool],
    ) -> Tensor:
        """See `LaneScorer.score_row`."""
        assert self.tokenizer is not None
        with use.timed("proxy"):
            cache = DynamicCache(config=self.proxy.config)
            call_forward(self.proxy, input_ids=input_ids.to(self.proxy.device)[None], cache=cache, use_cache=True)
            layers: list[Any] = cache.layers
            states = [(layer.keys, layer.values) for layer in layers]
            use.holds(sum(keys.nbytes + values.nbytes for keys, values in states))
            scores = reconstruction_scores(self.proxy, states, input_ids, context, self.tokenizer)
        return align(scores, request.geometry, self.layer_map)


def align(scores: Tensor, target: ModelGeometry, layer_map: Sequence[int] | None = None) -> Tensor:
    """The proxy's scores `[L_s, H_s, n]` to the target's `[L, H, n]`: layers by the map, heads in proportion.

    Raises:
        InvalidInputError: A map of another length, or to layers that the proxy does not have.
    """
    layers, heads, _ = scores.shape
    if layer_map is None:
        layer_map = [round(i * (layers - 1) / max(1, target.num_layers - 1)) for i in range(target.num_layers)]
    if len(layer_map) != target.num_layers or not all(0 <= layer < layers for layer in layer_map):
        raise InvalidInputError(
            f"layer_map: expected {target.num_layers} of the proxy's layers, 0 to {layers - 1}, got {list(layer_map)}"
        )
    head_map = [head * heads // target.num_key_value_heads for head in range(target.num_key_value_heads)]
    return scores[torch.tensor(layer_map)][:, torch.tensor(head_map)]
