"""What a mapper reads from the proxy: X (arXiv 2605.16360), from one pass of the proxy's first layers.

Three sources, alone or together, in this order of channels:

- ``attention``, the paper's: per layer and query head the largest and the mean weight that a token
  receives from later tokens outside its neighbourhood, and the mean from the last window;
- ``hidden``: the RMS-normalised hidden states after chosen layers, nothing quadratic about them;
- ``reconstruction``: the proxy's own KVzip scores (arXiv 2505.23416).

Weights and scores are on a log scale, since they span six decades. No N x N tensor is ever made, and
without ``reconstruction`` each layer's K and V are dropped as soon as the layer is done.
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
from transformers.cache_utils import Cache, DynamicLayer

from . import attention
from ._compat import call_forward
from .errors import InvalidInputError
from .geometry import ModelGeometry
from .logits import scaled_logits
from .reconstruction import reconstruction_scores

SOURCES = ("attention", "hidden", "reconstruction")
#: Later tokens nearer than this do not count: they look at each other whatever the text says.
NEIGHBOURHOOD = 16
#: The last queries, whose mean is a feature of its own.
WINDOW = 64
#: The least logarithm of a weight that is told apart, about 1e-7.
LOG_FLOOR = -16.0
#: Queries whose weights are held at once.
QUERY_BLOCK = 256


@dataclass(frozen=True)
class FeatureRecipe:
    """Which features, and how much of the proxy they need.

    Args:
        sources: Some of ``SOURCES``, in any order.
        proxy_layers: The first so many of the proxy's layers are run.
        hidden_layers: For ``hidden``: the states after so many layers, each 1 to ``proxy_layers``.

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
        if not all(1 <= layer <= self.proxy_layers for layer in self.hidden_layers):
            raise InvalidInputError(
                f"hidden_layers: expected 1 to {self.proxy_layers} (proxy_layers), got {self.hidden_layers!r}"
            )
        object.__setattr__(self, "sources", tuple(source for source in SOURCES if source in self.sources))
        object.__setattr__(self, "hidden_layers", tuple(sorted(self.hidden_layers)))

    def channels(self, config: PreTrainedConfig) -> int:
        """C for a proxy of this config."""
        geometry = ModelGeometry.from_config(config)
        sizes = {
            "attention": 3 * self.proxy_layers * geometry.num_attention_heads,
            "hidden": len(self.hidden_layers) * config.get_text_config(decoder=True).hidden_size,
            "reconstruction": self.proxy_layers * geometry.num_key_value_heads,
        }
        return sum(sizes[source] for source in self.sources)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; ``FeatureRecipe(**d)`` reads it back."""
        return dataclasses.asdict(self)


class Cancelled(Exception):
    """The features are not wanted any more."""


@torch.no_grad()
def proxy_features(
    proxy: PreTrainedModel,
    input_ids: Tensor,
    recipe: FeatureRecipe,
    *,
    context: tuple[int, int] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Tensor:
    """Features of one row.

    Args:
        proxy: A decoder without language-model head, of ``recipe.proxy_layers`` full-attention layers.
        input_ids: `[n]`.
        recipe: What to extract.
        context: ``(start, stop)``, what ``reconstruction`` repeats; all by default.
        tokenizer: The proxy's, for ``reconstruction``.
        cancelled: Asked after each layer.

    Returns: `[C, n]`, float32, on the proxy's device.

    Raises:
        InvalidInputError: ``reconstruction`` without a tokenizer.
        Cancelled: ``cancelled()`` became true.
    """
    if "reconstruction" in recipe.sources and tokenizer is None:
        raise InvalidInputError("the source 'reconstruction' asks the proxy to repeat: give its tokenizer")
    found: dict[str, list[Tensor]] = {source: [] for source in recipe.sources}
    own_thread = threading.get_ident()

    def after(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() != own_thread:  # another cache's pass over the same proxy
                return
            if cancelled():
                raise Cancelled
            if layer in recipe.hidden_layers:
                hidden = (output[0] if isinstance(output, tuple) else output)[0].float()  # [n, hidden]
                found["hidden"].append((hidden * hidden.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()).T)

        return hook

    ids = input_ids.to(proxy.device)[None]
    reads, keeps = "attention" in recipe.sources, "reconstruction" in recipe.sources
    layers: list[Any] = [_FeatureLayer(reads, keeps) for _ in range(recipe.proxy_layers)]
    handles = [layer.register_forward_hook(after(index + 1)) for index, layer in enumerate(decoder_layers(proxy))]
    try:
        with attention.Lease(proxy):
            call_forward(proxy, input_ids=ids, cache=Cache(layers=layers), use_cache=True)
    finally:
        for handle in handles:
            handle.remove()
    if "attention" in found:
        found["attention"] = [layer.features for layer in layers]
    if tokenizer is not None and "reconstruction" in found:
        span = (0, len(input_ids)) if context is None else context
        scores = reconstruction_scores(proxy, [layer.states for layer in layers], input_ids, span, tokenizer)
        found["reconstruction"] = [log_scale(scores.flatten(0, 1))]
    return torch.cat([part for source in recipe.sources for part in found[source]])


def decoder_layers(proxy: PreTrainedModel) -> nn.ModuleList:
    """The layers of a decoder."""
    layers = proxy.layers
    assert isinstance(layers, nn.ModuleList)
    return layers


class _FeatureLayer(DynamicLayer):
    """A layer of the proxy's cache: reads the attention if asked to, and keeps K and V only if asked to."""

    is_initialized = True

    def __init__(self, reads_attention: bool, keeps_states: bool) -> None:
        self.reads_attention, self.keeps_states = reads_attention, keeps_states
        self.features: Tensor | None = None  # [3 * Q, n]
        self.states: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.reads_attention:
            attention.hand_over(key_states, value_states, self)
        if self.keeps_states:
            self.states = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def attend(
        self,
        backend: attention.Backend,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> attention.AttentionOutput:
        self.features = received_attention(query[0], key[0], kwargs.get("scaling"), kwargs.get("softcap"))
        return backend(module, query, key, value, attention_mask, **kwargs)


def received_attention(query: Tensor, key: Tensor, scaling: float | None, softcap: float | None) -> Tensor:
    """What each token receives from later ones outside its neighbourhood, `[3 * Q, n]`, log scale.

    Per query head the largest weight, the mean weight, and the mean from the last ``WINDOW`` queries.

    Args:
        query: `[Q, n, D]`.
        key: `[H, n, D]`.
        scaling: See `logits.scaled_logits`.
        softcap: The same.
    """
    heads, tokens, _ = key.shape
    grouped = query.unflatten(0, (heads, -1))  # [H, G, n, D]
    shape = (heads, grouped.shape[1], tokens)
    largest, total, last = (query.new_zeros(shape, dtype=torch.float32) for _ in range(3))
    places = torch.arange(tokens, device=query.device)
    for block in places.split(QUERY_BLOCK):
        visible = int(block[-1]) + 1
        logits = scaled_logits(grouped[:, :, block], key[:, None, :visible], scaling, softcap)
        logits.masked_fill_(places[:visible] > block[:, None], -math.inf)
        weights = logits.softmax(-1).masked_fill_(places[:visible] > block[:, None] - NEIGHBOURHOOD, 0.0)
        largest[..., :visible] = torch.maximum(largest[..., :visible], weights.amax(2))
        total[..., :visible] += weights.sum(2)
        if visible > tokens - WINDOW:
            last[..., :visible] += weights[:, :, block >= tokens - WINDOW].sum(2)
    later = (tokens - NEIGHBOURHOOD - places).clamp(min=1)
    return log_scale(torch.stack([largest, total / later, last / min(WINDOW, tokens)]).flatten(0, 2))


def log_scale(weights: Tensor) -> Tensor:
    """The natural logarithm, not below ``LOG_FLOOR``."""
    return weights.clamp(min=math.exp(LOG_FLOOR)).log()
