"""KVzip+IAM: the proxy's own KVzip scores, carried layer to layer by a fixed map (arXiv 2507.11953)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from .._compat import call_forward
from ..attention.reconstruction import reconstruction_scores
from ..errors import InvalidInputError
from ..geometry import ModelGeometry
from .base import ScorerRun, ScoringRequest
from .on_lane import LaneScorer, LaneUse


class StaticAlignmentScorer(LaneScorer):
    """What a trained mapper has to beat: no training, and nothing that depends on the text but the proxy.

    Args:
        proxy: The whole proxy, a decoder without language-model head.
        tokenizer: The proxy's.
        layer_map: For each of the target's layers the proxy's, for full-attention layers one of full attention; by
            default in proportion to depth, see `proportional_layers`.
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

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Launch the proxy and return at once.

        Raises:
            InvalidInputError: A prompt of embeddings, longer than the proxy's positions, or of another tokenizer; a
                layer map that does not suit proxy and target.
        """
        check_layers(self._layers(request.geometry), ModelGeometry.from_config(self.proxy.config), request.geometry)
        return super().begin(request)

    def _layers(self, target: ModelGeometry) -> Sequence[int]:
        if self.layer_map is not None:
            return self.layer_map
        return proportional_layers(ModelGeometry.from_config(self.proxy.config), target)

    def score_row(
        self,
        input_ids: Tensor,
        context: tuple[int, int],
        request: ScoringRequest,
        use: LaneUse,
    ) -> Tensor:
        """See `LaneScorer.score_row`."""
        assert self.tokenizer is not None
        with use.timed("proxy"):
            cache = DynamicCache(config=self.proxy.config)
            call_forward(self.proxy, input_ids=input_ids.to(self.proxy.device)[None], cache=cache, use_cache=True)
            layers: list[Any] = cache.layers
            states = [(layer.keys, layer.values) for layer in layers]
            scores = reconstruction_scores(self.proxy, states, input_ids, context, self.tokenizer)
        aligned = align(scores, request.geometry, self._layers(request.geometry))
        use.holds(sum(keys.nbytes + values.nbytes for keys, values in states) + scores.nbytes + aligned.nbytes)
        return aligned


def proportional_layers(proxy: ModelGeometry, target: ModelGeometry) -> list[int]:
    """For each of the target's layers the proxy's, in proportion to the depth among the full-attention layers of each.

    What stands for a sliding-window layer of the target is of no account.
    """
    last = max(1, len(target.full_layers) - 1)
    layers = [proxy.full_layers[0]] * target.num_layers
    for place, layer in enumerate(target.full_layers):
        layers[layer] = proxy.full_layers[round(place * (len(proxy.full_layers) - 1) / last)]
    return layers


def check_layers(layer_map: Sequence[int], proxy: ModelGeometry, target: ModelGeometry) -> None:
    """Refuse a map that does not give every full-attention layer of the target one of the proxy's.

    Raises:
        InvalidInputError: A map of another length, or to layers that the proxy does not have, or does not score.
    """
    if len(layer_map) != target.num_layers or not all(0 <= layer < proxy.num_layers for layer in layer_map):
        raise InvalidInputError(
            f"layer_map: expected {target.num_layers} of the proxy's layers, 0 to {proxy.num_layers - 1}, got "
            f"{list(layer_map)}"
        )
    sliding = {layer_map[layer] for layer in target.full_layers} - set(proxy.full_layers)
    if sliding:
        raise InvalidInputError(
            "layer_map: expected full-attention layers of the proxy for those of the target, got the proxy's layers "
            f"{sorted(sliding)}, which have a sliding window and no scores; full attention: {list(proxy.full_layers)}"
        )


def align(scores: Tensor, target: ModelGeometry, layer_map: Sequence[int]) -> Tensor:
    """The proxy's scores `[L_s, H_s, n]` to the target's `[L, H, n]`: layers by the map, heads in proportion."""
    heads = scores.shape[1]
    head_map = [head * heads // target.num_key_value_heads for head in range(target.num_key_value_heads)]
    return scores[torch.tensor(layer_map)][:, torch.tensor(head_map)]
