"""The count, mean and scatter of vectors, which can be added up from parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """The moments of n vectors of D numbers, or of several such sets at once.

    Args:
        count: n, the number of vectors.
        mean: `[..., D]`, their mean.
        scatter: `[..., D, D]`, the sum of ``(x - mean) (x - mean)'`` over the vectors.
    """

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, vectors: Tensor) -> Moments:
        """The moments of vectors `[..., n, D]`, n at least 1."""
        mean = vectors.mean(-2)
        centred = vectors - mean.unsqueeze(-2)
        with torch.autocast(vectors.device.type, enabled=False):  # autocast would round the products
            return cls(vectors.shape[-2], mean, centred.mT @ centred)

    def __add__(self, other: Moments) -> Moments:
        """The moments of both sets together, accurate even if the mean is far from zero (Chan, Golub, LeVeque 1979)."""
        count = self.count + other.count
        step = other.mean - self.mean
        between = step.unsqueeze(-1) * step.unsqueeze(-2) * (self.count * other.count / count)
        return Moments(count, self.mean + step * (other.count / count), self.scatter + other.scatter + between)

    def double(self) -> Moments:
        """The moments in float64."""
        return Moments(self.count, self.mean.double(), self.scatter.double())

    @property
    def covariance(self) -> Tensor:
        """`[..., D, D]`, the scatter divided by n."""
        return self.scatter / self.count
