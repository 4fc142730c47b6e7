"""The features that a mapper reads from the proxy: X (arXiv 2605.16360), from one pass of the proxy's first layers.

There are three sources, which may be combined. Their channels come in this order:

- ``attention``, the paper's source: for each layer and query head, the largest and the mean weight that a token
  receives from later tokens outside its neighbourhood, and the mean weight that it receives from the last window;
- ``hidden``: the RMS-normalised hidden states after chosen layers, at a cost linear in N;
- ``reconstruction``: the proxy's own KVzip scores (arXiv 2505.23416).

Weights and scores are on a log scale, because they span six decades. No tensor here is N x N. Without
``reconstruction``, each layer's K and V are dropped as soon as the layer is done. But transformers itself makes a mask
`[1, 1, N, N]` for a proxy with sliding windows or eager attention, and eager attention makes N x N weights if
``attention`` is not a source. For long texts, use a proxy with full attention under ``sdpa``.
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
#: Later tokens nearer than this do not count, because close tokens attend to each other whatever the text says.
NEIGHBOURHOOD = 16
#: The number of last queries whose mean weight is a feature of its own.
WINDOW = 64
#: The smallest logarithm of a weight, that of about 1e-7. Smaller weights are raised to it.
LOG_FLOOR = -16.0


@dataclass(frozen=True)
class FeatureRecipe:
    """Which features a mapper reads, and how many of the proxy's layers they need.

    Args:
        sources: One or more of ``"attention"``, ``"hidden"`` and ``"reconstruction"``, in any order.
        proxy_layers: How many of the proxy's first layers are run.
        hidden_layers: The layers after which the source ``"hidden"`` reads the hidden states, counted from 1 to
            ``proxy_layers``, each once. Given with ``"hidden"``, and only with it.

    Raises:
        InvalidInputError: An argument is not valid; the error names it. Raised on construction.
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
        """The number of channels of each source, for a proxy with this config."""
        geometry = ModelGeometry.from_config(config)
        sizes = {
            "attention": 3 * self.proxy_layers * geometry.num_attention_heads,
            "hidden": len(self.hidden_layers) * config.get_text_config(decoder=True).hidden_size,
            "reconstruction": self.proxy_layers * geometry.num_key_value_heads,
        }
        return {source: sizes[source] for source in self.sources}

    def channels(self, config: PreTrainedConfig) -> int:
        """C, the number of channels of all sources together, for a proxy with this config."""
        return sum(self.sizes(config).values())

    def to_dict(self) -> dict[str, Any]:
        """The recipe as a dict for JSON; ``FeatureRecipe(**d)`` reads it back."""
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
    """Extract the features of one row.

    Args:
        proxy: A decoder without language-model head, of ``recipe.proxy_layers`` layers.
        input_ids: `[n]`, the row's tokens.
        recipe: The features to extract.
        context: The span ``(start, stop)`` that ``reconstruction`` repeats. By default the whole row.
        tokenizer: The proxy's tokenizer. Only ``reconstruction`` needs it.
        holds: Is called after each layer with the bytes of the features and of the K and V that are held, and once more
            with the scores of ``reconstruction``.

    Returns: the features `[C, n]`, float32, on the proxy's device.

    Raises:
        InvalidInputError: ``reconstruction`` is a source and there is no tokenizer.
    """
    if "reconstruction" in recipe.sources and tokenizer is None:
        raise InvalidInputError(
            "expected a tokenizer, since the source 'reconstruction' asks the proxy to repeat its context, got none: "
            "give its tokenizer"
        )
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
    """Reads the attention and keeps K and V, each only if it is wanted.

    Args:
        place: `[3 * Q, n]`, to be filled with the features of the attention; None if they are not wanted.
        window: The window in tokens of a sliding-window layer, or None.
        keeps_states: Whether to keep K and V.
    """

    def __init__(self, place: Tensor | None, window: int | None, keeps_states: bool) -> None:
        super().__init__()
        self.place, self.window, self.keeps_states = place, window, keeps_states
        self.states: tuple[Tensor, Tensor] | None = None
        self.bytes = 0
        """The bytes of the layer's K and V."""

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
            call.query[0], call.key[0], call.value[0], call.scaling, call.softcap, self.window, call.sinks
        )
        self.place.copy_(features)
        return output.transpose(0, 1)[None].contiguous(), None


def received_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The weight that each token receives from later tokens outside its neighbourhood, and the attention's output.

    For each query head, the features are the largest weight, the mean weight, and the mean weight from the last
    ``WINDOW`` queries. They come from the same weights as the output, so the attention is computed once.

    Args:
        query: `[Q, n, D]`.
        key: `[H, n, D]`.
        value: `[H, n, Dv]`.
        scaling: Factor of the dot product; None for ``D ** -0.5``.
        softcap: Cap of the logits, or None.
        window: The window in tokens of a sliding-window layer, or None.
        sinks: `[Q]`, the logit of each query head's attention sink, or None.

    Returns: the features `[3 * Q, n]`, float32, on a log scale, and the output `[Q, n, Dv]`.
    """
    heads, tokens, _ = key.shape
    group = len(query) // heads
    largest, total, last = (query.new_zeros((heads, group, tokens), dtype=torch.float32) for _ in range(3))
    output = query.new_empty(heads, group, tokens, value.shape[2])
    places = torch.arange(tokens, device=query.device)
    for head, start, stop, weights in causal_weights(query, key, scaling, softcap, window, sinks):
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
    """The natural logarithm of weights, raised to ``LOG_FLOOR`` where it is smaller."""
    return weights.clamp(min=math.exp(LOG_FLOOR)).log()
