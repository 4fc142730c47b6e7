"""Attention logits as transformers' models define them: scaled, and capped for Gemma 2."""

from __future__ import annotations

import torch
from torch import Tensor


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
