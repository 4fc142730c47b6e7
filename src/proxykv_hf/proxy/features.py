"""What a mapper reads from the proxy: X (arXiv 2605.16360), from one pass of the proxy's first layers.

Three sources, alone or together, in this order of channels:

- ``attention``, the paper's: per layer and query head the largest and the mean weight that a token
  receives from later tokens outside its neighbourhood, and the mean from the last window;
- ``hidden``: the RMS-normalised hidden states after chosen layers, nothing quadratic about them;
- ``reconstruction``: the proxy's own KVzip scores (arXiv 2505.23416).

Weights and scores are on a log scale, since they span six decades. Nothing here is N x N, and without
``reconstruction`` each layer's K and V are dropped as soon as the layer is done. transformers itself makes
a mask `[1, 1, N, N]` for a proxy with sliding windows or eager attention, and eager attention its weights
where ``attention`` is not among the sources: long texts want a proxy of full attention under ``sdpa``.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .._compat import Cache, call_forward
from ..attention.functions import AttentionCall, AttentionOutput
from ..attention.lease import Lease
from ..attention.logits import causal_weights
from ..attention.passing import PassingLayer
from ..attention.reconstruction import reconstruction_scores
from ..errors import InvalidInputError
from ..geometry import ModelGeometry

SOURCES = ("attention", "hidden", "reconstruction")
#: Later tokens nearer than this do not count: they look at each other whatever the text says.
NEIGHBOURHOOD = 16
#: The last queries, whose mean is a feature of its own.
WINDOW = 64
#: The least logarithm of a weight that is told apart, about 1e-7.
LOG_FLOOR = -16.0


@dataclass(frozen=True)
class FeatureRecipe:
    """Which features, and how much of the proxy they need.

    Args:
        sources: Some of ``SOURCES``, in any order.
        proxy_layers: The first so many of the proxy's layers are run.
        hidden_layers: For ``hidden``: the states after so many layers, each 1 to ``proxy_layers`` and there once.

    Raises:
        InvalidInputError: On construction, naming the argument.
    """

    sources: tuple[str, ...]
    proxy_layers: int
    hidden_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.sources or any(source not in SOURCES for source in self.sources):
            raise InvalidInputError(f"sources: expected some of {', '.join(SOURCES)}, got {self.sources!r}")
        if self.proxy_layers < 1:
            raise InvalidInputError(f"proxy_layers: expected at least 1, got {self.proxy_layers}")
        if ("hidden" in self.sources) != bool(self.hidden_layers):
            raise InvalidInputError("hidden_layers: expected with the source 'hidden', and only with it")
        if len(set(self.hidden_layers)) < len(self.hidden_layers):
            raise InvalidInputError(f"hidden_layers: expected each layer once, got {self.hidden_layers!r}")
        if not all(1 <= layer <= self.proxy_layers for layer in self.hidden_layers):
            raise InvalidInputError(
                f"hidden_layers: expected 1 to {self.proxy_layers} (proxy_layers), got {self.hidden_layers!r}"
            )
        object.__setattr__(self, "sources", tuple(source for source in SOURCES if source in self.sources))
        object.__setattr__(self, "hidden_layers", tuple(sorted(self.hidden_layers)))

    def sizes(self, config: PreTrainedConfig) -> dict[str, int]:
        """Channels of each source for a proxy of this config."""
        geometry = ModelGeometry.from_config(config)
        sizes = {
            "attention": 3 * self.proxy_layers * geometry.num_attention_heads,
            "hidden": len(self.hidden_layers) * config.get_text_config(decoder=True).hidden_size,
            "reconstruction": self.proxy_layers * geometry.num_key_value_heads,
        }
        return {source: sizes[source] for source in self.sources}

    def channels(self, config: PreTrainedConfig) -> int:
        """C for a proxy of this config."""
        return sum(self.sizes(config).values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON; ``FeatureRecipe(**d)`` reads it back."""
        return dataclasses.asdict(self)


@torch.no_grad()
def proxy_features(
    proxy: PreTrainedModel,
    input_ids: Tensor,
    recipe: FeatureRecipe,
    *,
    context: tuple[int, int] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    holds: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """Features of one row.

    Args:
        proxy: A decoder without language-model head, of ``recipe.proxy_layers`` layers.
        input_ids: `[n]`.
        recipe: What to extract.
        context: ``(start, stop)``, what ``reconstruction`` repeats; all by default.
        tokenizer: The proxy's, for ``reconstruction``.
        holds: Told after each layer how many bytes features, K and V take, and with ``reconstruction`` its scores too.

    Returns: `[C, n]`, float32, on the proxy's device.

    Raises:
        InvalidInputError: ``reconstruction`` without a tokenizer.
    """
    if "reconstruction" in recipe.sources and tokenizer is None:
        raise InvalidInputError("the source 'reconstruction' asks the proxy to repeat: give its tokenizer")
    own_thread = threading.get_ident()
    shape = (recipe.channels(proxy.config), len(input_ids))
    features = torch.empty(shape, dtype=torch.float32, device=proxy.device)
    room = dict(zip(recipe.sources, features.split(list(recipe.sizes(proxy.config).values())), strict=True))

    def after(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() != own_thread:  # another cache's pass over the same proxy
                return
            if layer in recipe.hidden_layers:
                hidden = (output[0] if isinstance(output, tuple) else output)[0].float()  # [n, hidden]
                place = room["hidden"].unflatten(0, (len(recipe.hidden_layers), -1))[recipe.hidden_layers.index(layer)]
                torch.mul(hidden.T, hidden.pow(2).mean(-1).add(1e-6).rsqrt(), out=place)
            held = layers[:layer] if keeps else layers[layer - 1 : layer]
            holds(features.nbytes + sum(entry.bytes for entry in held))

        return hook

    ids = input_ids.to(proxy.device)[None]
    keeps = "reconstruction" in recipe.sources
    places = room["attention"].chunk(recipe.proxy_layers) if "attention" in room else [None] * recipe.proxy_layers
    windows = ModelGeometry.from_config(proxy.config).sliding_windows
    layers: list[Any] = [_FeatureLayer(*each, keeps) for each in zip(places, windows, strict=True)]
    handles = [layer.register_forward_hook(after(index + 1)) for index, layer in enumerate(decoder_layers(proxy))]
    try:
        with Lease(proxy):
            call_forward(proxy, input_ids=ids, cache=Cache(layers=layers), use_cache=True)
    finally:
        for handle in handles:
            handle.remove()
    if tokenizer is not None and "reconstruction" in room:
        span = (0, len(input_ids)) if context is None else context
        states = [layer.states for layer in layers]
        scores = reconstruction_scores(proxy, states, input_ids, span, tokenizer)
        holds(features.nbytes + sum(layer.bytes for layer in layers) + scores.nbytes)
        room["reconstruction"].copy_(log_scale(scores.flatten(0, 1)))
    return features


def decoder_layers(proxy: PreTrainedModel) -> nn.ModuleList:
    """The layers of a decoder."""
    layers = proxy.layers
    assert isinstance(layers, nn.ModuleList)
    return layers


class _FeatureLayer(PassingLayer):
    """Reads the attention if asked to, and keeps K and V only if asked to.

    Args:
        place: `[3 * Q, n]`, where the attention's features go, or None.
        window: The window of a sliding-window layer, or None.
        keeps_states: Whether K and V are wanted later.
    """

    def __init__(self, place: Tensor | None, window: int | None, keeps_states: bool) -> None:
        super().__init__()
        self.place, self.window, self.keeps_states = place, window, keeps_states
        self.states: tuple[Tensor, Tensor] | None = None
        self.bytes = 0
        """Of the layer's K and V."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.bytes = key_states.nbytes + value_states.nbytes
        if self.keeps_states:
            self.states = (key_states, value_states)
        if self.place is None:
            return key_states, value_states
        return super().update(key_states, value_states, *args, **kwargs)

    def attend(self, call: AttentionCall) -> AttentionOutput:
        assert self.place is not None
        features, output = received_attention(
            call.query[0], call.key[0], call.value[0], call.scaling, call.softcap, self.window
        )
        self.place.copy_(features)
        return output.transpose(0, 1)[None].contiguous(), None


def received_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, softcap: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """What each token receives from later ones outside its neighbourhood, and causal attention's own output.

    Per query head the largest weight, the mean weight, and the mean from the last ``WINDOW`` queries, from
    the same weights that make the output: attention is computed once.

    Args:
        query: `[Q, n, D]`.
        key: `[H, n, D]`.
        value: `[H, n, Dv]`.
        scaling: See `logits.scaled_logits`.
        softcap: The same.
        window: See `logits.causal_weights`.

    Returns: features `[3 * Q, n]`, float32, log scale; and the output `[Q, n, Dv]`.
    """
    heads, tokens, _ = key.shape
    group = len(query) // heads
    largest, total, last = (query.new_zeros((heads, group, tokens), dtype=torch.float32) for _ in range(3))
    output = query.new_empty(heads, group, tokens, value.shape[2])
    places = torch.arange(tokens, device=query.device)
    for head, start, stop, weights in causal_weights(query, key, scaling, softcap, window):
        output[head, :, start:stop] = (weights.flatten(0, 1).to(value.dtype) @ value[head, :stop]).unflatten(
            0, (group, -1)
        )
        near = max(0, start - NEIGHBOURHOOD + 1)
        weights[:, :, near:].masked_fill_(places[near:stop] > places[start:stop, None] - NEIGHBOURHOOD, 0.0)
        torch.maximum(largest[head, :, :stop], weights.amax(1), out=largest[head, :, :stop])
        total[head, :, :stop] += weights.sum(1)
        if stop > tokens - WINDOW:
            last[head, :, :stop] += weights[:, max(0, tokens - WINDOW - start) :].sum(1)
    later = (tokens - NEIGHBOURHOOD - places).clamp(min=1)
    features = log_scale(torch.stack([largest, total / later, last / min(WINDOW, tokens)]).flatten(0, 2))
    return features, output.flatten(0, 1)


def log_scale(weights: Tensor) -> Tensor:
    """The natural logarithm, not below ``LOG_FLOOR``."""
    return weights.clamp(min=math.exp(LOG_FLOOR)).log()
