"""Ablated mappers: without one of the stages, or with a simpler model in place of all stages.

Each is a `HybridAxialMapper` and is trained like one. None trains a parameter that it does not use.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxykv_hf import HybridAxialMapper, HybridAxialMapperConfig
from proxykv_hf.proxy.mapper import _TargetHeads


class NoEncoder(HybridAxialMapper):
    """Without the time encoder: the stem's few positions are all that a time step sees of other time steps."""

    def __init__(self, config: HybridAxialMapperConfig) -> None:
        super().__init__(config)
        self.encoder = nn.ModuleList()

    def _encode(self, stem_input: Tensor, start: int) -> Tensor:  # [B, n + kernel_size - 1, R] to [B, n, M, d]
        states = self.stem(stem_input.transpose(1, 2)).transpose(1, 2)  # without sinusoidal positions
        return self.encoder_norm(states.unflatten(2, (-1, self.config.width)))


class StaticHeadMap(HybridAxialMapper):
    """Without cross-attention: each target head mixes the M head tokens with the same weights at every time step."""

    def __init__(self, config: HybridAxialMapperConfig) -> None:
        super().__init__(config)
        self.key = nn.Identity()  # type: ignore[assignment]
        self.heads = _StaticHeads(self.heads, config.head_tokens)


class _StaticHeads(_TargetHeads):
    """Replaces a mapper's target heads, and takes over their other parameters."""

    def __init__(self, heads: _TargetHeads, head_tokens: int) -> None:
        super().__init__(len(heads.query), heads.query.shape[1], heads.linear.shape[1])
        self.output, self.bias, self.linear = heads.output, heads.bias, heads.linear
        self.shares = nn.Parameter(torch.zeros(len(heads.bias), head_tokens))
        del self.query

    def forward(self, key: Tensor, value: Tensor) -> Tensor:  # [B, n, M, d] to [B, n, T]
        return (self.shares.softmax(1).T * functional.linear(value, self.output)).sum(2)


class NoLinearPath(HybridAxialMapper):
    """The three stages, without the linear path."""

    def __init__(self, config: HybridAxialMapperConfig) -> None:
        super().__init__(config)
        self.heads.linear.requires_grad_(False)  # it is zero, and stays zero


class LinearPathAlone(HybridAxialMapper):
    """A reduced-rank regression, trained with the hybrid loss."""

    def __init__(self, config: HybridAxialMapperConfig) -> None:
        super().__init__(config)
        _leave_out_stages(self)

    def score(self, projected: Tensor) -> Tensor:  # [B, N, R] to [B, L, H, N]
        return _by_layer(self, self.heads.direct(projected))


class NeighbourMLP(HybridAxialMapper):
    """An MLP from the channels of a token and its two neighbours to R units with GELU, and from these to the heads."""

    def __init__(self, config: HybridAxialMapperConfig) -> None:
        super().__init__(config)
        _leave_out_stages(self)
        self.compress = nn.Identity()  # type: ignore[assignment]
        self.hidden = nn.Linear(3 * config.channels, config.bottleneck)
        self._init_weights(self.hidden)

    def project(self, features: Tensor) -> Tensor:  # [B, C, N] to [B, N, R]
        standard = functional.pad(super().project(features), (0, 0, 1, 1))  # [B, N + 2, C]
        return self.hidden(torch.cat([standard[:, :-2], standard[:, 1:-1], standard[:, 2:]], dim=2))

    def score(self, projected: Tensor) -> Tensor:  # [B, N, R] to [B, L, H, N]
        return _by_layer(self, self.heads.direct(self.dropout(functional.gelu(projected))))


def _leave_out_stages(mapper: HybridAxialMapper) -> None:
    """Keep only the bottleneck and the linear path. Parameters of the heads that the stages use are not trained."""
    for name in ("stem", "encoder_norm", "key", "value"):
        setattr(mapper, name, nn.Identity())
    mapper.encoder = nn.ModuleList()
    mapper.heads.query.requires_grad_(False)
    mapper.heads.output.requires_grad_(False)


def _by_layer(mapper: HybridAxialMapper, full: Tensor) -> Tensor:
    """`[B, N, T]` to `[B, L, H, N]`, zero in sliding-window layers."""
    scores = full.new_zeros(len(full), *mapper.prior.shape, full.shape[1])
    scores[:, list(mapper.config.target.full_layers)] = full.transpose(1, 2).unflatten(1, (-1, mapper.prior.shape[1]))
    return scores
