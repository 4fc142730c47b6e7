"""Checks the arguments of a forward that uses a cache, and corrects its attention mask, before the model runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.lease import own_attention_name
from ..errors import InvalidInputError
from .prompt import Prompt

#: Forward arguments whose last dimension counts tokens.
TOKEN_ARGUMENTS = ("input_ids", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


def without_seen(kwargs: Mapping[str, Any], seen: int) -> dict[str, Tensor]:
    """Remove the tokens that the cache has seen from a forward that brings all tokens again.

    The first forward of transformers' assisted decoding brings all tokens, whatever the cache holds. Its positions
    start at 0 again, which tells it from a continuation.

    Args:
        kwargs: The forward's keyword arguments.
        seen: Tokens that the cache has seen, at least 1.

    Returns: the keyword arguments to replace; empty for every other forward.

    Raises:
        InvalidInputError: There are no new tokens to predict from.
    """
    ids, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
    if ids is None or positions is None or positions.shape[-1] != ids.shape[1] or positions[..., 0].any():
        return {}
    logits = kwargs.get("logits_to_keep")
    wanted = max(logits, 1) if isinstance(logits, int) else 1
    if ids.shape[1] - seen < wanted:
        raise InvalidInputError(
            f"expected more than the {seen} seen, got {ids.shape[1] - wanted + 1} tokens: assisted decoding over a "
            "filled cache needs all tokens, the seen ones and at least one new one"
        )
    given = {name: kwargs.get(name) for name in TOKEN_ARGUMENTS}
    return {name: value[..., seen:] for name, value in given.items() if value is not None}


def check_input(call: Mapping[str, Any], rows: int, seen: int) -> tuple[int, int]:
    """Check that the input of a forward fits what the cache holds.

    Args:
        call: The forward's arguments by name.
        rows: Batch rows that the cache holds; 0 while it is empty.
        seen: Tokens that the cache has seen.

    Returns: the shape ``(B, q)`` of the input.

    Raises:
        InvalidInputError: The input does not fit.
    """
    if call.get("use_cache") is False:
        raise InvalidInputError(
            "expected use_cache=True with a cache, got False: transformers would give wrong tokens, since it sends all "
            "tokens again to a cache that has seen them; leave use_cache or the cache out"
        )
    given = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
    if given is None or given.ndim < 2 or given.shape[1] == 0:
        more = (
            f" beyond the {seen} that the cache has seen: to start again, call reset() or make a new cache"
            if seen
            else ""
        )
        raise InvalidInputError(f"expected input_ids [batch, tokens] with at least one token, got none{more}")
    batch, tokens = given.shape[:2]
    if rows and batch != rows:
        raise InvalidInputError(
            f"expected {rows} rows, as many as the cache holds, got {batch}: fork(n) makes a cache of more rows"
        )
    mask = call.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        got = f"{mask.ndim}-D" if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidInputError(
            f"expected a 2-D attention_mask [batch, tokens seen and new], got {got}: pass a 2-D mask or none"
        )
    if mask is not None and mask.shape != (batch, seen + tokens):
        raise InvalidInputError(
            f"expected attention_mask [{batch}, {seen + tokens}], over the {seen} tokens seen (not only those "
            f"kept) and {tokens} new ones, got {[*mask.shape]}"
        )
    return batch, tokens


def returns_attentions(call: Mapping[str, Any], model: nn.Module) -> bool:
    """Whether a forward returns attention matrices: the call or the config asks for them, and attention is eager.

    As in transformers, other back ends return none.
    """
    asked = call.get("output_attentions")
    config: Any = model.config
    asked = getattr(config, "output_attentions", False) if asked is None else asked
    return bool(asked) and own_attention_name(config.get_text_config(decoder=True)) == "eager"


def mask_as_held(mask: Tensor | None, prompt: Prompt, rows: Tensor) -> Tensor | None:
    """Move the padding in a continuation's attention mask to where the cache has it.

    For a target with sliding windows ``prefill`` moves padding to the left, while the caller's mask may still show it
    elsewhere. All later tokens see all KV pairs that were kept, so a mask cannot hide other tokens of the prompt.

    Args:
        mask: `[B, N]` over all tokens, seen and new, or None.
        prompt: The cache's prompt.
        rows: `[B]`, the distinct row of each batch row.

    Returns: the corrected mask `[B, N]`, or None if nothing needs to change.

    Raises:
        InvalidInputError: The mask hides another number of the prompt's tokens than its padding has.
    """
    if mask is None:
        return None
    held = prompt.real()[rows].to(mask.device)
    given = mask[:, : prompt.columns].bool()
    if torch.equal(held, given):
        return None
    if not torch.equal(held.sum(1), given.sum(1)):
        raise InvalidInputError(
            f"expected attention_mask to show the prompt's {held.sum(1).tolist()} tokens, got "
            f"{given.sum(1).tolist()}: a token of the prompt cannot be masked later"
        )
    return torch.cat([held.to(mask.dtype), mask[:, prompt.columns :]], dim=1)
