"""The linear baseline: statistics of the training data, and a ridge regression in closed form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..proxy.mapper import CLAMP
from .dataset import TrainingDocument


@dataclass(frozen=True)
class Statistics:
    """Statistics over all tokens of the training documents.

    Args:
        mean: `[C]`, the mean of each feature.
        std: `[C]`, the standard deviation of each feature.
        prior: `[L, H]`, the mean log score of each head.
        tokens: The number of tokens.
    """

    mean: Tensor
    std: Tensor
    prior: Tensor
    tokens: int

    @classmethod
    def of(cls, documents: Iterable[TrainingDocument]) -> Statistics:
        """Compute the statistics in one pass over the documents; there must be at least one."""
        total = square = prior = torch.zeros((), dtype=torch.float64)
        tokens = 0
        for document in documents:
            features = document.features.double()
            total = total + features.sum(1)
            square = square + features.pow(2).sum(1)
            prior = prior + document.scores.double().sum(2)
            tokens += features.shape[1]
        mean = total / tokens
        std = (square / tokens - mean.pow(2)).clamp(min=1e-8).sqrt()
        return cls(mean.float(), std.float(), (prior / tokens).float(), tokens)

    def standardise(self, features: Tensor) -> Tensor:
        """Standardise features `[C, n]` in the same way as `HybridAxialMapper.project`."""
        return ((features.float() - self.mean[:, None]) / self.std[:, None]).clamp(-CLAMP, CLAMP)


@dataclass(frozen=True)
class Ridge:
    """Ridge regression of log scores on standardised features.

    Args:
        statistics: The statistics of the documents that the regression was fitted to.
        weights: `[C, T]`, T = L * H.
    """

    statistics: Statistics
    weights: Tensor

    @classmethod
    def fit(cls, documents: Iterable[TrainingDocument], statistics: Statistics, strength: float) -> Ridge:
        """Solve ``(X X' / n + strength) W = X (Y - prior)' / n`` for W, over all n tokens of the documents.

        Args:
            documents: The documents, which are read once.
            statistics: The statistics of the same documents.
            strength: Above 0; the variance of the standardised features is about 1.
        """
        channels = len(statistics.mean)
        prior = statistics.prior.flatten()[:, None]  # [T, 1]
        gram = torch.zeros(channels, channels, dtype=torch.float32)
        moments = torch.zeros(channels, len(prior), dtype=torch.float32)
        for document in documents:
            x = statistics.standardise(document.features)
            gram.addmm_(x, x.T, alpha=1 / statistics.tokens)
            moments.addmm_(x, (document.scores.flatten(0, 1) - prior).T, alpha=1 / statistics.tokens)
        gram.diagonal().add_(strength)
        return cls(statistics, torch.cholesky_solve(moments, torch.linalg.cholesky(gram)))

    def predict(self, features: Tensor) -> Tensor:
        """Predict log scores `[L, H, n]` from features `[C, n]`."""
        prior = self.statistics.prior
        scores = self.weights.T @ self.statistics.standardise(features)  # [T, n]
        return scores.view(*prior.shape, -1) + prior[..., None]
