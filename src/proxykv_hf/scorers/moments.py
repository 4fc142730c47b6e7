"""How vectors are distributed, count, mean and scatter, put together from parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Of n vectors of D numbers, or of several such sets at once.

    Args:
        count: n.
        mean: `[..., D]`.
        scatter: `[..., D, D]`, the sum of ``(x - mean) (x - mean)'``.
    """

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, vectors: Tensor) -> Moments:
        """Of vectors `[..., n, D]`, n of at least 1."""
        mean = vectors.mean(-2)
        centred = vectors - mean.unsqueeze(-2)
        with torch.autocast(vectors.device.type, enabled=False):  # which would round the products
            return cls(vectors.shape[-2], mean, centred.mT @ centred)

    def __add__(self, other: Moments) -> Moments:
        """Of both together (Chan, Golub and LeVeque, 1979): nothing is lost where the mean is far from zero."""
        count = self.count + other.count
        step = other.mean - self.mean
        between = step.unsqueeze(-1) * step.unsqueeze(-2) * (self.count * other.count / count)
        return Moments(count, self.mean + step * (other.count / count), self.scatter + other.scatter + between)

    def double(self) -> Moments:
        """In float64."""
        return Moments(self.count, self.mean.double(), self.scatter.double())

    @property
    def covariance(self) -> Tensor:
        """`[..., D, D]`, the scatter over n."""
        return self.scatter / self.count
