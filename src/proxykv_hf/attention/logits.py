"""Attention logits as transformers' models define them (scaled, and capped for Gemma 2), and a prompt's weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

#: The most attention weights that are held at once, in elements: those that fit in a CPU core's cache, and those that
#: keep a GPU busy.
IN_CACHE, ON_GPU = 1 << 19, 1 << 26


def scaled_logits(query: Tensor, key: Tensor, scaling: float | None, softcap: float | None) -> Tensor:
    """Attention logits before mask and softmax, float32.

    Args:
        query: `[..., q, D]`.
        key: `[..., N, D]`.
        scaling: Factor of the dot product; None for ``D ** -0.5``.
        softcap: ``c`` of ``c * tanh(logits / c)`` (Gemma 2), or None.

    Returns: `[..., q, N]`.
    """
    return logits(query * (query.shape[-1] ** -0.5 if scaling is None else scaling), key, softcap)


def logits(query: Tensor, key: Tensor, softcap: float | None) -> Tensor:
    """Compute `scaled_logits` of queries that are scaled already. If query and key are swapped, it is transposed."""
    products = torch.matmul(query, key.transpose(-1, -2)).float()
    return products if softcap is None else (products / softcap).tanh() * softcap


def attention_weights(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax over the last dimension. An attention sink (gpt-oss) takes a share of the weight, but has no value.

    Args:
        logits: `[..., q, N]`, float32.
        sinks: The logit of each row's sink, `[..., 1, 1]` or another shape that fits `[..., q, 1]`; None without sinks.
    """
    if sinks is None:
        return logits.softmax(-1)
    sinks = sinks.float()
    largest = torch.maximum(logits.amax(-1, keepdim=True), sinks)
    shares = (logits - largest).exp()
    return shares / (shares.sum(-1, keepdim=True) + (sinks - largest).exp())


def causal_weights(
    query: Tensor,
    key: Tensor,
    scaling: float | None,
    softcap: float | None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Iterator[tuple[int, int, int, Tensor]]:
    """The weights of causal attention, block by block, so that there is never an N x N tensor.

    Args:
        query: `[Q, q, D]`, the queries of the last q tokens.
        key: `[H, N, D]`.
        scaling: Factor of the dot product; None for ``D ** -0.5``.
        softcap: Cap of the logits, or None.
        window: The window in tokens of a sliding-window layer: a query sees this many last keys, including its own
            token's. None for full attention.
        sinks: `[Q]`, the logit of each query head's attention sink, or None.

    Yields: a KV head, ``start``, ``stop``, and weights `[G, stop - start, stop]`, float32: those that the queries of
        tokens ``start`` to ``stop`` give to all keys before ``stop``, for each of the G query heads of the group.
    """
    heads, tokens, _ = key.shape
    grouped = query.unflatten(0, (heads, -1))  # [H, G, q, D]
    group, first = grouped.shape[1], tokens - grouped.shape[2]
    step = max(1, (ON_GPU if query.is_cuda else IN_CACHE) // (group * tokens))
    places = torch.arange(tokens, device=query.device)
    for head in range(heads):
        for start in range(first, tokens, step):
            stop = min(start + step, tokens)
            rows = grouped[head, :, start - first : stop - first]  # [G, m, D]
            logits = scaled_logits(rows.flatten(0, 1), key[head, :stop], scaling, softcap).unflatten(0, (group, -1))
            logits[:, :, start:].masked_fill_(places[start:stop] > places[start:stop, None], -math.inf)
            if window is not None:
                logits.masked_fill_(places[:stop] <= places[start:stop, None] - window, -math.inf)
            own_sinks = None if sinks is None else sinks.view(heads, group, 1, 1)[head]
            yield head, start, stop, attention_weights(logits, own_sinks)
