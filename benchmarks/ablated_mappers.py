"""The mapper with one of its stages left out, and what is put in the place of all of them.

Each is a `HybridAxialMapper` that trains as one, and has no parameter that it does not use.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxykv_hf import HybridAxialMapper, HybridAxialMapperConfig
from proxykv_hf.proxy.mapper import _TargetHeads


class NoEncoder(HybridAxialMapper):
    """The stem's head tokens as they are: nothing is carried along time beyond the stem's few positions."""

    def __init__(self, config: HybridAxialMapperConfig) -> None:
        super().__init__(config)
        self.encoder = nn.ModuleList()

    def _encode(self, stem_input: Tensor, start: int) -> Tensor:  # [B, n + kernel_size - 1, R] to [B, n, M, d]
        states = self.stem(stem_input.transpose(1, 2)).transpose(1, 2)  # no positions are added
        return self.encoder_norm(states.unflatten(2, (-1, self.config.width)))


class StaticHeadMap(HybridAxialMapper):
    """Each target head mixes the M head tokens in the same shares at every time step."""

    def __init__(self, config: HybridAxialMapperConfig) -> None:
        super().__init__(config)
        self.key = nn.Identity()  # type: ignore[assignment]
        self.heads = _StaticHeads(self.heads, config.head_tokens)


class _StaticHeads(_TargetHeads):
    """In place of a mapper's target heads, whose other parameters it takes over."""

    def __init__(self, heads: _TargetHeads, head_tokens: int) -> None:
        super().__init__(len(heads.query), heads.query.shape[1], heads.linear.shape[1])
        self.output, self.bias, self.linear = heads.output, heads.bias, heads.linear
        self.shares = nn.Parameter(torch.zeros(len(heads.bias), head_tokens))
        del self.query

    def forward(self, key: Tensor, value: Tensor) -> Tensor:  # [B, n, M, d] to [B, n, T]
        return (self.shares.softmax(1).T * functional.linear(value, self.output)).sum(2)


class NoLinearPath(HybridAxialMapper):
    """The three stages alone."""

    def __init__(self, config: HybridAxialMapperConfig) -> None:
        super().__init__(config)
        self.heads.linear.requires_grad_(False)  # and is zero


class LinearPathAlone(HybridAxialMapper):
    """A reduced-rank regression, trained by the hybrid loss."""

    def __init__(self, config: HybridAxialMapperConfig) -> None:
        super().__init__(config)
        _leave_out_stages(self)

    def score(self, projected: Tensor) -> Tensor:  # [B, N, R] to [B, L, H, N]
        return _by_layer(self, self.heads.direct(projected))


class NeighbourMLP(HybridAxialMapper):
    """The channels of a token and its two neighbours to R units, GELU, and these to the heads."""

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
    """All but the bottleneck and the linear path; what the heads alone would use stays, but is not trained."""
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
