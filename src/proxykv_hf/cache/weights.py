"""Attention matrices over everything that was seen, for a forward with ``output_attentions``.

As in transformers, each layer has a matrix `[B, Q, q, N]`. Other forwards do not use this file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.logits import attention_weights, scaled_logits
from .ragged import tail_mask
from .storage import RaggedStorage


def spread_weights(weights: Tensor, places: Tensor) -> Tensor:
    """Move the weights over what a rectangular layer stores to the columns of everything that was seen.

    Args:
        weights: `[B, Q, q, K + T]`, the weights of the prompt's K kept tokens and of T later tokens.
        places: `[B, H, P]`, bool, the prompt columns that each head keeps: K of P for every row and head.

    Returns: `[B, Q, q, P + T]`, zero where a KV pair was evicted.
    """
    batch, query_heads, queries, stored = weights.shape
    heads, prompt = places.shape[1:]
    kept = int(places[0, 0].sum())
    columns = places.nonzero()[:, 2].view(batch, heads, kept).to(weights.device)
    later = torch.arange(prompt, prompt + stored - kept, device=weights.device).expand(batch, heads, -1)
    index = torch.cat([columns, later], dim=2).repeat_interleave(query_heads // heads, dim=1)  # [B, Q, K + T]
    whole = weights.new_zeros(batch, query_heads, queries, prompt + stored - kept)
    return whole.scatter_(3, index[:, :, None].expand(-1, -1, queries, -1), weights)


def ragged_weights(
    query: Tensor,
    storage: RaggedStorage,
    attention_mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    places: Tensor,
) -> Tensor:
    """The weights of `ragged.ragged_attention`, at the columns of everything that was seen.

    Args:
        query: `[B, Q, q, D]`, the queries of the tail's last q columns.
        storage: The block, and the tail of T columns.
        attention_mask: The mask of the tail, see `ragged.tail_mask`.
        scaling: Factor of the dot product; None for ``D ** -0.5``.
        softcap: Cap of the logits, or None.
        sinks: `[Q]`, the logit of each query head's attention sink, or None.
        places: `[B, H, P]`, bool, which of the P columns before the tail each head keeps.

    Returns: `[B, Q, q, P + T]`, in the query's dtype. Zero where a KV pair was evicted.
    """
    batch, query_heads, queries, _ = query.shape
    heads, prompt = places.shape[1:]
    group, columns = query_heads // heads, storage.length
    visible = tail_mask(attention_mask, batch, queries, columns, query.device)  # [B, q, T]
    places = places.to(query.device)
    whole = query.new_zeros(batch, query_heads, queries, prompt + columns)
    for row, distinct in enumerate(storage.rows.tolist()):
        for head, (keys, _) in enumerate(storage.block.heads[distinct]):
            mine = slice(head * group, (head + 1) * group)
            late = scaled_logits(query[row, mine], storage.keys[row, head], scaling, softcap)
            late = late.masked_fill(~visible[row], float("-inf"))
            logits = torch.cat([scaled_logits(query[row, mine], keys, scaling, softcap), late], dim=-1)
            own_sinks = None if sinks is None else sinks[mine].view(-1, 1, 1)
            weights = attention_weights(logits, own_sinks).to(query.dtype)
            whole[row, mine, :, :prompt][:, :, places[row, head]] = weights[..., : len(keys)]
            whole[row, mine, :, prompt:] = weights[..., len(keys) :]
    return whole
