"""Shrink a plain `DynamicCache` that somebody already holds."""

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
    """Keep the best of a prefilled `DynamicCache`, in place; it can be used as before.

    Args:
        cache: Prefilled, and used by nobody meanwhile.
        scores: `[B, L, H, N]`, higher is kept; rows of sliding-window layers are ignored.
        policy: How much is kept.
        target: The model that made the cache. Needed where heads or rows keep different numbers
            (``allocation="global"``, padding): their attention is ours, and ``target`` has it until
            the cache is collected.
        attention_mask: `[B, N]` over all that the cache holds, left-padded, where rows have padding.
        context: What may be evicted, in each row's own positions.

    Raises:
        CacheStateError: An empty cache, one that is pruned already, or one that offloads its layers.
        ScoringError: Scores of a wrong shape, or with NaN.
        InvalidInputError: A target is needed and none was given, or a mask of another shape.
        InvalidPolicyError: ``policy`` is not a `RetentionPolicy`.
    """
    check_policy(policy)
    if type(cache) is not DynamicCache:
        raise CacheStateError(
            f"expected a plain DynamicCache, got {type(cache).__name__}; a ProxyPrunedCache has compress()"
        )
    if cache.offloading:
        raise CacheStateError(
            "expected a DynamicCache whose layers stay where they are, got one with offloading=True, which moves each "
            "layer between two forwards, and a pruned one cannot be moved: make it without"
        )
    layers: list[Any] = cache.layers
    places = [index for index, layer in enumerate(layers) if not isinstance(layer, DynamicSlidingWindowLayer)]
    if not places or any(type(layers[i]) is not DynamicLayer or not layers[i].is_initialized for i in places):
        raise CacheStateError("expected a prefilled cache with full-attention layers that are whole")
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
    if any(scores[row, :, :, pad:].isnan().any() for row, pad in enumerate(prompt.pads)):
        raise ScoringError("the scores hold NaN")
    keep, over_budget = keep_masks(scores, prompt, [policy] * len(prompt.lengths))
    ragged = is_ragged(keep, prompt)
    if ragged and target is None:
        raise InvalidInputError(
            "heads or rows keep different numbers of tokens, and their attention needs the model: pass "
            "target=model, or use allocation='uniform' on a prompt without padding"
        )
    warn_over_budget(over_budget)
    if keep.all():
        return
    lease = Lease(target) if ragged and target is not None else None
    pruner = Pruner(keep, rows, ragged, places)
    # All are made before one is put in: an error on the way must not leave a cache of two lengths.
    smaller = [pruner.prune(index, layers[index].keys, layers[index].values) for index in places]
    for index, pruned in zip(places, smaller, strict=True):
        pruned.lease = lease
        layers[index] = pruned
    for index in set(range(len(layers))) - set(places):  # a sliding layer's view would hold the whole prompt
        layers[index].keys, layers[index].values = own(layers[index].keys), own(layers[index].values)
