"""Attention logits as transformers' models define them, scaled, and capped for Gemma 2; and the weights of a prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

#: Attention weights held at once, in elements: what fits in a CPU core's cache, and what fills a GPU.
IN_CACHE, ON_GPU = 1 << 19, 1 << 26


def scaled_logits(query: Tensor, key: Tensor, scaling: float | None, softcap: float | None) -> Tensor:
    """Attention logits before mask and softmax, float32.

    Args:
        query: `[..., q, D]`.
        key: `[..., N, D]`.
        scaling: Factor of the dot product; ``D ** -0.5`` if None.
        softcap: ``c`` of ``c * tanh(logits / c)`` (Gemma 2), or None.

    Returns: `[..., q, N]`.
    """
    return logits(query * (query.shape[-1] ** -0.5 if scaling is None else scaling), key, softcap)


def logits(query: Tensor, key: Tensor, softcap: float | None) -> Tensor:
    """As `scaled_logits`, of queries (or keys: the product is the same, transposed) that are scaled already."""
    products = torch.matmul(query, key.transpose(-1, -2)).float()
    return products if softcap is None else (products / softcap).tanh() * softcap


def causal_weights(
    query: Tensor, key: Tensor, scaling: float | None, softcap: float | None, window: int | None = None
) -> Iterator[tuple[int, int, int, Tensor]]:
    """Causal attention's weights, block by block: never an N x N tensor.

    Args:
        query: `[Q, q, D]`, of the last q tokens.
        key: `[H, N, D]`.
        scaling: See `scaled_logits`.
        softcap: The same.
        window: Of a sliding-window layer: a query sees so many last keys, its own token's among them.

    Yields: a KV head, ``start`` and ``stop``, and the weights `[G, stop - start, stop]`, float32, that the queries of
        the tokens ``start`` to ``stop`` give to the keys up to there, for each query head of the group.
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
            yield head, start, stop, logits.softmax(-1)
