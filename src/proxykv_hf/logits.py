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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.dtype == torch.float32:  # queries are fewer than logits
        logits = torch.matmul(query * scale, key.transpose(-1, -2))
    else:  # where scaling first would round
        logits = torch.matmul(query, key.transpose(-1, -2)).float().mul_(scale)
    return logits if softcap is None else (logits / softcap).tanh() * softcap
