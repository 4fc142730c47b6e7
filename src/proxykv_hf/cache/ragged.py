"""Attention over a `RaggedStorage`, in which every head of every row has its own number of keys.

The block needs no mask. One pass over a head's keys serves all queries that read them: those of all query heads of the
group, of all new tokens, and of all batch rows that are copies of one row. There are two ways with the same result:

- head by head, on every device: block and tail are in one softmax;
- on CUDA in half precision, one kernel computes the blocks of all heads at once, with each head as a sequence of its
  own. Its output is merged with the tail's by their log-sum-exp.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..attention.logits import attention_weights, logits
from .storage import RaggedStorage

#: The most logits that are held at once, in elements.
LOGITS_LIMIT = 1 << 23
#: Threads share a sum of weighted values in parts of at least ``LEAST_PART`` tokens, if it has at most ``MOST_ROWS``
#: rows.
LEAST_PART, MOST_ROWS = 512, 32

#: A kernel: ``(query [S, 1, D], key [T, 1, D], value [T, 1, D], cu_q, cu_k, max_q, max_k, scale)`` to the output
#: `[S, 1, D]` and the log-sum-exp of S elements.
VarlenAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float], tuple[Tensor, Tensor]]


def ragged_attention(
    query: Tensor,
    storage: RaggedStorage,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the newest tokens over everything that is stored.

    Args:
        query: `[B, Q, q, D]`, the queries of the tail's last q columns.
        storage: Every query sees its whole block, and the part of its tail that ``attention_mask`` allows.
        attention_mask: The mask of the tail, see `tail_mask`.
        scaling: Factor of the dot product; None for ``D ** -0.5``.
        softcap: ``c`` of ``c * tanh(logits / c)`` (Gemma 2), or None.
        sinks: `[Q]`, the logit of each query head's attention sink, or None.

    Returns: the output `[B, q, Q, Dv]`.
    """
    batch, query_heads, queries, width = query.shape
    columns = storage.length
    scale = width**-0.5 if scaling is None else scaling
    most = columns + max(max(storage.block.lengths[row]) for row, _ in storage.members)
    step = max(1, LOGITS_LIMIT // (batch * query_heads * most))
    outputs = []
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        unseen = queries - stop  # the number of last columns that none of these queries sees
        mask = None
        if attention_mask is not None or stop - start > 1:  # a single query sees the whole tail
            given = attention_mask
            if given is not None:
                given = given[..., : given.shape[-1] - unseen]
                given = given[..., start:stop, :] if given.ndim == 4 else given
            mask = tail_mask(given, batch, stop - start, columns - unseen, query.device)
        outputs.append(_some_queries(query[:, :, start:stop] * scale, storage, columns - unseen, mask, softcap, sinks))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _some_queries(
    query: Tensor,
    storage: RaggedStorage,
    columns: int,
    mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute `ragged_attention` for so few queries that all their logits can be held at once.

    Args:
        query: `[B, Q, q, D]`, already scaled.
        storage: The block and the tail.
        columns: T, the number of first columns of the tail that these queries may see.
        mask: `[B, q, T]`, bool; None if every query sees all T columns.
        softcap: Cap of the logits, or None.
        sinks: `[Q]`, the logit of each query head's attention sink, or None.

    Returns: the output `[B, q, Q, Dv]`.
    """
    batch, _, queries, width = query.shape
    keys, values = storage.keys[:, :, :columns], storage.values[:, :, :columns]
    grouped = query.reshape(batch, keys.shape[1], -1, width)  # [B, H, G*q, D]
    tail = logits(grouped, keys, softcap)  # [B, H, G*q, T]
    if mask is not None:
        tail.unflatten(2, (-1, queries)).masked_fill_(~mask[:, None, None], -math.inf)
    if sinks is not None:
        sinks = sinks.view(keys.shape[1], -1, 1).expand(-1, -1, queries).flatten(1)  # [H, G*q]
    if sinks is None and _suits_varlen(grouped, storage, softcap) and (varlen := varlen_attention()) is not None:
        output = _all_heads(grouped, tail, values, storage, varlen)
    else:
        output = _head_by_head(grouped, tail, values, storage, softcap, sinks)
    return output.reshape(batch, -1, queries, output.shape[-1]).transpose(1, 2).contiguous()


def _head_by_head(
    grouped: Tensor,
    tail: Tensor,
    tail_values: Tensor,
    storage: RaggedStorage,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute the output head by head.

    Args:
        grouped: `[B, H, r, D]`, scaled queries: r = G * q for the G query heads of a group.
        tail: `[B, H, r, T]`, the logits of the tail.
        tail_values: `[B, H, T, Dv]`, the values of the tail.
        storage: The storage whose block is read.
        softcap: Cap of the logits, or None.
        sinks: `[H, r]`, the logit of each query's attention sink, or None.

    Returns: the output `[B, H, r, Dv]`.
    """
    found = [_distinct_row(row, grouped[at], tail[at], storage, softcap, sinks) for row, at in storage.members]
    if len(found) == 1:
        output, tail_weights = found[0]
    else:
        output = grouped.new_empty(*grouped.shape[:3], tail_values.shape[-1])
        tail_weights = torch.empty_like(tail, dtype=grouped.dtype)
        for (_, at), (part, rest) in zip(storage.members, found, strict=True):
            output[at], tail_weights[at] = part, rest
    return output.float().add_(tail_weights @ tail_values).to(grouped.dtype)


def _distinct_row(
    row: int, grouped: Tensor, tail: Tensor, storage: RaggedStorage, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """For n copies of a row: the block's part of the output `[n, H, r, Dv]`, and the tail's weights `[n, H, r, T]`.

    Args:
        row: The distinct row.
        grouped: `[n, H, r, D]`, the scaled queries of the copies.
        tail: `[n, H, r, T]`, the logits of the copies' tails.
        storage: The storage whose block is read.
        softcap: Cap of the logits, or None.
        sinks: `[H, r]`, the logit of each query's attention sink, or None.
    """
    copies, heads, rows, _ = grouped.shape
    outputs, rests = [], []
    for (keys, values), queries, late, sink in zip(
        storage.block.heads[row],
        grouped.transpose(0, 1).flatten(1, 2).unbind(),
        tail.transpose(0, 1).flatten(1, 2).unbind(),
        [None] * heads if sinks is None else sinks.repeat(1, copies).unsqueeze(-1).unbind(),  # each [n*r, 1]
        strict=True,
    ):
        block = logits(keys, queries, softcap).t()  # [n*r, K]; BLAS is fastest with the tall matrix on the left
        weights = attention_weights(torch.cat([block, late], dim=1), sink).to(grouped.dtype)
        outputs.append(_weighted_sum(weights[:, : len(keys)], values))
        rests.append(weights[:, len(keys) :])
    shape = (heads, copies, rows, -1)
    return torch.stack(outputs).view(shape).transpose(0, 1), torch.stack(rests).view(shape).transpose(0, 1)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """``weights @ values`` of `[m, K]` and `[K, Dv]`. A long sum for few rows is split, for threads to share it."""
    parts = min(torch.get_num_threads(), len(values) // LEAST_PART)
    if values.is_cuda or parts < 2 or len(weights) > MOST_ROWS:
        return weights @ values
    even = len(values) // parts * parts
    whole = torch.bmm(
        weights[:, :even].unflatten(1, (parts, -1)).transpose(0, 1), values[:even].unflatten(0, (parts, -1))
    ).sum(0)
    # Not in place, since autocast does not convert the dtypes of in-place products.
    return whole if even == len(values) else torch.addmm(whole, weights[:, even:], values[even:])


def _all_heads(
    grouped: Tensor, tail: Tensor, tail_values: Tensor, storage: RaggedStorage, varlen: VarlenAttention
) -> Tensor:
    """Compute the output with one kernel for all heads. See `_head_by_head` for the arguments and the result."""
    batch, heads, rows, width = grouped.shape
    block, device = storage.block, grouped.device
    members: dict[int, slice | Tensor] = dict(storage.members)
    # The queries of each distinct row, head after head; within a head, those of all copies of the row.
    packed = torch.cat([grouped[members[row]].transpose(0, 1).reshape(-1, width) for row in members])  # [S, D]
    copies = {row: len(grouped[members[row]]) for row in members}
    sizes = [copies.get(row, 0) * rows for row in range(len(block.lengths)) for _ in range(heads)]
    lengths = [length for row in block.lengths for length in row]
    output, block_lse = varlen(
        packed[:, None],
        block.keys[:, None],
        block.values[:, None],
        torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device),
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device),
        max(sizes),
        max(lengths),
        1.0,
    )
    merged = grouped.new_empty(batch, heads, rows, output.shape[-1])
    lse = tail.new_empty(batch, heads, rows)
    shares = [copies[row] * heads * rows for row in members]
    for row, out, sums in zip(members, output.flatten(1).split(shares), block_lse.flatten().split(shares), strict=True):
        merged[members[row]] = out.view(heads, -1, rows, out.shape[-1]).transpose(0, 1)
        lse[members[row]] = sums.view(heads, -1, rows).transpose(0, 1)
    total = torch.logaddexp(lse, tail.logsumexp(-1))[..., None]
    tail_weights = (tail - total).exp().to(grouped.dtype)
    return merged * (lse[..., None] - total).exp().to(grouped.dtype) + tail_weights @ tail_values


def _suits_varlen(grouped: Tensor, storage: RaggedStorage, softcap: float | None) -> bool:
    """Whether the flash kernels can compute with these tensors."""
    width = grouped.shape[-1]
    return (
        grouped.is_cuda
        and torch.cuda.get_device_capability(grouped.device) >= (8, 0)
        and grouped.dtype in (torch.float16, torch.bfloat16)
        and softcap is None
        and storage.values.shape[-1] == width
        and width % 8 == 0
        and width <= 256
    )


@functools.cache  # called in every layer of every step, and Python searches for a missing module every time
def varlen_attention() -> VarlenAttention | None:
    """The flash kernel for sequences of different lengths: flash-attn's if it is installed, else torch's, else None."""
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        pass
    else:

        def from_flash_attn(
            query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float
        ) -> tuple[Tensor, Tensor]:
            output, lse, _ = flash_attn_varlen_func(
                query, key, value, cu_q, cu_k, max_q, max_k, softmax_scale=scale, return_attn_probs=True
            )
            return output, lse

        return from_flash_attn
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError:
        return None
    if "scale" not in inspect.signature(varlen_attn).parameters:  # torch 2.10's kernel sets the scale itself
        return None

    def from_torch(
        query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        aux = AuxRequest(lse=True)
        output, lse = varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, return_aux=aux, scale=scale)
        return output, lse

    return from_torch


def tail_mask(attention_mask: Tensor | None, rows: int, queries: int, columns: int, device: torch.device) -> Tensor:
    """Which columns of the tail each query sees, from the mask of any back end.

    Args:
        attention_mask: None, `[B, T]`, or `[B, 1, q, T]`, which is bool or additive.
        rows: B, the number of batch rows.
        queries: q, the number of queries, which are those of the last q columns.
        columns: T, the number of columns.

    Returns: `[B, q, T]`, bool.
    """
    causal = torch.ones(queries, columns, dtype=torch.bool, device=device).tril(columns - queries)
    causal = causal.expand(rows, -1, -1)
    if attention_mask is None:
        return causal
    mask = attention_mask[..., -columns:]
    mask = mask if mask.dtype == torch.bool else mask > -1 if mask.ndim == 4 else mask != 0
    return causal & (mask[:, None] if mask.ndim == 2 else mask[:, 0])
