"""KVzip+IAM (arXiv 2507.11953): the proxy's own KVzip scores, carried over to the target's layers by a fixed map."""

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
    """Scores the target's KV pairs by the proxy's own KVzip scores. A trained mapper has to beat this scorer.

    Fixed maps of layers and heads carry the scores over to the target. Nothing is trained.

    Args:
        proxy: The whole proxy, a decoder without language-model head.
        tokenizer: The proxy's tokenizer. The target's tokenizer must give the same tokens.
        layer_map: For each layer of the target, the index of the proxy's layer that scores it. A full-attention layer
            needs a full-attention layer of the proxy. By default layers correspond in proportion to their depth.
        threads: CPU threads that the proxy uses; None for as many as torch uses elsewhere.
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
        """Check the prompt and the layer map, launch the proxy, and return at once.

        Raises:
            InvalidInputError: The prompt came as embeddings, takes more positions than the proxy has, or has tokens of
                another tokenizer. Or the layer map does not fit proxy and target.
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
        """Score one row, see `LaneScorer.score_row`."""
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
    """For each layer of the target, a layer of the proxy at the same relative depth among the full-attention layers.

    The scores of the target's sliding-window layers are ignored, so these layers may get any layer.
    """
    last = max(1, len(target.full_layers) - 1)
    layers = [proxy.full_layers[0]] * target.num_layers
    for place, layer in enumerate(target.full_layers):
        layers[layer] = proxy.full_layers[round(place * (len(proxy.full_layers) - 1) / last)]
    return layers


def check_layers(layer_map: Sequence[int], proxy: ModelGeometry, target: ModelGeometry) -> None:
    """Refuse a map that does not give a full-attention layer of the proxy to every full-attention layer of the target.

    Raises:
        InvalidInputError: The map has another length, or names layers that the proxy does not have or does not score.
    """
    if len(layer_map) != target.num_layers or not all(0 <= layer < proxy.num_layers for layer in layer_map):
        raise InvalidInputError(
            f"layer_map: expected {target.num_layers} of the proxy's layers, 0 to {proxy.num_layers - 1}, got "
            f"{list(layer_map)}: give one for each layer of the target"
        )
    sliding = {layer_map[layer] for layer in target.full_layers} - set(proxy.full_layers)
    if sliding:
        raise InvalidInputError(
            "layer_map: expected full-attention layers of the proxy for those of the target, got the proxy's layers "
            f"{sorted(sliding)}, which have a sliding window and no scores; full attention: {list(proxy.full_layers)}"
        )


def align(scores: Tensor, target: ModelGeometry, layer_map: Sequence[int]) -> Tensor:
    """Carry the proxy's scores `[L_s, H_s, n]` over to the target, `[L, H, n]`: layers by the map, heads in proportion.

    Args:
        scores: `[L_s, H_s, n]`, the scores of the proxy's layers and KV heads.
        target: The target's geometry.
        layer_map: L layers of the proxy, one for each layer of the target.
    """
    heads = scores.shape[1]
    head_map = [head * heads // target.num_key_value_heads for head in range(target.num_key_value_heads)]
    return scores[torch.tensor(layer_map)][:, torch.tensor(head_map)]
