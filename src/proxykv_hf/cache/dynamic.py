"""Prune a plain `DynamicCache` in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .._compat import DynamicLayer, DynamicSlidingWindowLayer
from ..attention.lease import Lease
from ..errors import CacheStateError, InvalidInputError, ScoringError
from .prompt import Context, read_prompt
from .pruning import Pruner, is_ragged, keep_masks, warn_over_budget
from .retention import RetentionPolicy, check_policy
from .storage import own


@torch.no_grad()
def prune_dynamic_cache(
    cache: DynamicCache,
    scores: Tensor,
    policy: RetentionPolicy,
    *,
    target: PreTrainedModel | None = None,
    attention_mask: Tensor | None = None,
    context: Context | None = None,
) -> None:
    """Keep only the best KV pairs of a prefilled `DynamicCache`, in place. The cache can be used as before.

    Args:
        cache: A prefilled cache. Nothing else may use it during the call.
        scores: `[B, L, H, N]`; KV pairs with higher scores are kept. The scores of sliding-window layers are ignored.
        policy: How much is kept.
        target: The model that made the cache. It is needed if heads or rows keep different numbers of KV pairs
            (``allocation="global"``, or padding). Its attention implementation is then replaced until the cache is
            garbage-collected.
        attention_mask: `[B, N]` over all tokens that the cache holds, zero wherever a row has no token. None without
            padding.
        context: The part that may be evicted: one span ``(start, stop)`` for all rows or one per row, in the row's own
            positions (padding is not counted). By default everything.

    Raises:
        CacheStateError: The cache is empty, pruned already, or offloads its layers, or is not a plain `DynamicCache`.
        ScoringError: The scores have a wrong shape, or hold NaN.
        InvalidInputError: ``target`` is needed and missing, the mask has another shape, or the context lies outside a
            row.
        InvalidPolicyError: ``policy`` is not a `RetentionPolicy`.
    """
    check_policy(policy)
    if type(cache) is not DynamicCache:
        raise CacheStateError(
            f"expected a plain DynamicCache, got {type(cache).__name__}; a ProxyPrunedCache has compress()"
        )
    if cache.offloading:
        raise CacheStateError(
            "expected a DynamicCache whose layers stay on their device, got one with offloading=True, which moves "
            "layers, and pruned layers cannot be moved: make the cache without offloading"
        )
    layers: list[Any] = cache.layers
    places = [index for index, layer in enumerate(layers) if not isinstance(layer, DynamicSlidingWindowLayer)]
    if not places or any(type(layers[i]) is not DynamicLayer or not layers[i].is_initialized for i in places):
        raise CacheStateError(
            "expected a prefilled cache whose full-attention layers are whole, got one that is empty or pruned "
            "already: make a new DynamicCache and run the model over the prompt with it"
        )
    batch, heads, tokens, _ = layers[places[0]].keys.shape
    expected = (batch, len(layers), heads, tokens)
    if tuple(scores.shape) != expected:
        raise ScoringError(f"expected scores [B, L, H, N] = {[*expected]}, got {[*scores.shape]}")
    if attention_mask is not None and attention_mask.shape != (batch, tokens):
        raise InvalidInputError(
            f"expected attention_mask [{batch}, {tokens}], over all that the cache holds (after generate also the "
            f"tokens generated), got {[*attention_mask.shape]}"
        )
    prompt, rows = read_prompt(None, attention_mask, None, context, (batch, tokens))
    scores = scores[:, places]
    if prompt.order is not None:
        scores = scores.gather(3, prompt.order.to(scores.device)[:, None, None].expand_as(scores))
    if any(scores[row, :, :, pad:].isnan().any() for row, pad in enumerate(prompt.pads)):
        raise ScoringError("expected scores that are numbers, got scores that hold NaN: check what computes them")
    keep, over_budget = keep_masks(scores, prompt, [policy] * len(prompt.lengths))
    ragged = is_ragged(keep, prompt)
    if ragged and target is None:
        raise InvalidInputError(
            "expected a target, since heads or rows keep different numbers of tokens, got none: pass target=model, or "
            "use allocation='uniform' on a prompt without padding"
        )
    warn_over_budget(over_budget)
    if keep.all():
        return
    lease = Lease(target) if ragged and target is not None else None
    pruner = Pruner(prompt.in_cache(keep), rows, ragged, places)
    # Prune all layers before the first one is replaced: an error must not leave the cache half pruned.
    smaller = [pruner.prune(index, layers[index].keys, layers[index].values) for index in places]
    for index, pruned in zip(places, smaller, strict=True):
        pruned.lease = lease
        layers[index] = pruned
    for index in set(range(len(layers))) - set(places):  # a view would keep the whole prompt in memory
        layers[index].keys, layers[index].values = own(layers[index].keys), own(layers[index].values)
