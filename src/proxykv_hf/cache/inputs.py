"""What a forward with a cache is given: checked, and its mask put right, before any work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInputError
from .prompt import Prompt

#: Arguments of a forward whose last dimension counts tokens.
TOKEN_ARGUMENTS = ("input_ids", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


def without_seen(kwargs: Mapping[str, Any], seen: int) -> dict[str, Tensor]:
    """What to change in a forward that brings all tokens though the cache has ``seen`` of them; else nothing.

    The first forward of transformers' assisted decoding does, whatever the cache holds. Its positions, which
    start over, tell it from a continuation.

    Args:
        kwargs: The forward's.
        seen: At least 1.

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
            f"assisted decoding over a filled cache wants all tokens, those seen and new ones: expected more than the "
            f"{seen} seen, got {ids.shape[1] - wanted + 1}"
        )
    given = {name: kwargs.get(name) for name in TOKEN_ARGUMENTS}
    return {name: value[..., seen:] for name, value in given.items() if value is not None}


def check_input(call: Mapping[str, Any], rows: int, seen: int, ragged: bool) -> tuple[int, int]:
    """The shape ``(B, q)`` of a forward's input.

    Args:
        call: The forward's arguments by name.
        rows: Rows that the cache holds; 0 while it is empty.
        seen: Tokens that it has seen.
        ragged: Whether its heads keep, or will keep, different numbers of tokens.

    Raises:
        InvalidInputError: It does not fit what the cache holds.
    """
    given = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
    if given is None or given.ndim < 2 or given.shape[1] == 0:
        more = (
            f" beyond the {seen} that the cache has seen: to begin anew call reset() or make another cache"
            if seen
            else ""
        )
        raise InvalidInputError(f"expected input_ids [batch, tokens] with at least one token, got none{more}")
    batch, tokens = given.shape[:2]
    if rows and batch != rows:
        raise InvalidInputError(f"expected {rows} rows as the cache holds, got {batch}: fork(n) makes a cache of more")
    mask = call.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        raise InvalidInputError("expected a 2-D attention_mask [batch, tokens seen and new], or none")
    if mask is not None and mask.shape != (batch, seen + tokens):
        raise InvalidInputError(
            f"expected attention_mask [{batch}, {seen + tokens}], over the {seen} tokens seen (not only those "
            f"kept) and {tokens} new ones, got {[*mask.shape]}"
        )
    if ragged and call.get("output_attentions"):
        raise InvalidInputError(
            "heads that keep different numbers of tokens have no attention matrices to return: drop "
            "output_attentions, or use allocation='uniform' on a prompt without padding"
        )
    return batch, tokens


def mask_as_held(mask: Tensor | None, prompt: Prompt, rows: Tensor) -> Tensor | None:
    """A continuation's mask with the prompt's padding where the cache has it, or None if it is there.

    ``prefill`` moves padding to the left, and the mask that the caller has may still show it on the
    right. What was kept is seen by all later tokens, so no other mask of the prompt can be honoured.

    Args:
        mask: `[B, N]`, over all tokens seen and new, or None.
        prompt: The cache's.
        rows: `[B]`, each batch row's distinct row.

    Raises:
        InvalidInputError: Another number of the prompt's tokens is masked than padding.
    """
    if mask is None:
        return None
    pads = torch.tensor([prompt.pads[row] for row in rows.tolist()], device=mask.device)
    held = torch.arange(prompt.columns, device=mask.device) >= pads[:, None]
    given = mask[:, : prompt.columns].bool()
    if torch.equal(held, given):
        return None
    if not torch.equal(held.sum(1), given.sum(1)):
        raise InvalidInputError(
            f"expected attention_mask to show the prompt's {held.sum(1).tolist()} tokens, got "
            f"{given.sum(1).tolist()}: a token of the prompt cannot be masked later"
        )
    return torch.cat([held.to(mask.dtype), mask[:, prompt.columns :]], dim=1)
