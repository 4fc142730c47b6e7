"""How well scores agree with the teacher's: what training is judged by, and what it has to beat."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Shares of KV pairs kept at which agreement is measured, those of the mapper's card.
RATIOS = (0.1, 0.2, 0.3, 0.5)


def measure(ours: Tensor, teacher: Tensor) -> dict[str, float]:
    """All metrics of one document.

    - ``head@rho``, ``global@rho``: the share of the teacher's Top-K that is in ours, within each head (mean over
      heads), and over all heads;
    - ``mass@rho``: the share of the teacher's whole score that our Top-K over all heads keeps;
    - ``spearman``: the rank correlation within each head, mean over heads.

    Args:
        ours: `[L, H, n]`, log scale.
        teacher: `[L, H, n]`, log scale.
    """
    found = {f"head@{ratio}": overlap(ours, teacher, ratio) for ratio in RATIOS}
    found |= {f"global@{ratio}": overlap(ours.flatten(), teacher.flatten(), ratio) for ratio in RATIOS}
    found |= {f"mass@{ratio}": retained_mass(ours, teacher, ratio) for ratio in RATIOS}
    return found | {"spearman": float(spearman(ours, teacher).mean())}


def mean_metrics(documents: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean over documents, each counting the same."""
    return {name: sum(found[name] for found in documents) / len(documents) for name in documents[0]}


def mean_agreement(found: dict[str, float]) -> float:
    """One number to choose weights by: the mean of ``head@`` and ``global@`` over all ratios."""
    values = [value for name, value in found.items() if name.startswith(("head@", "global@"))]
    return sum(values) / len(values)


def describe(found: dict[str, float]) -> str:
    """Agreement, in a line for people."""
    values = [f"{name} {value:.3f}" for name, value in found.items() if name.startswith(("head@", "global@"))]
    return f"{' '.join(values)} mean {mean_agreement(found):.4f}"


def gain(found: dict[str, float], baseline: dict[str, float]) -> dict[str, float]:
    """How much better each metric is than a baseline's, the head prior's say; a difference, not a ratio."""
    return {name: value - baseline[name] for name, value in found.items()}


def prior_scores(prior: Tensor, tokens: int, generator: torch.Generator) -> Tensor:
    """The head prior's scores: each head's mean, whatever the text says.

    Equal scores would be taken in the order of the text, which is no choice at all: a little noise chooses.

    Args:
        prior: `[L, H]`, log scale.
        tokens: n.
        generator: On the CPU.

    Returns: `[L, H, n]`, log scale.
    """
    return prior[..., None] + 1e-4 * torch.rand(*prior.shape, tokens, generator=generator)


def overlap(ours: Tensor, theirs: Tensor, ratio: float) -> float:
    """``|our Top-K and theirs| / K`` along the last axis, mean over the others."""
    keep = max(1, round(ratio * ours.shape[-1]))
    chosen = torch.zeros_like(ours).scatter_(-1, ours.topk(keep).indices, 1.0)
    return float(chosen.gather(-1, theirs.topk(keep).indices).mean())


def retained_mass(ours: Tensor, teacher: Tensor, ratio: float) -> float:
    """The teacher's scores of our Top-K over all heads, of their sum over all KV pairs."""
    mass = teacher.flatten().double().exp()
    keep = max(1, round(ratio * len(mass)))
    return float(mass[ours.flatten().topk(keep).indices].sum() / mass.sum())


def spearman(ours: Tensor, teacher: Tensor) -> Tensor:
    """Spearman's rank correlation along the last axis, ties at their mean rank; 0 where either is constant.

    `[..., n]` twice to `[...]`.
    """
    mine, theirs = (ranks - ranks.mean(-1, keepdim=True) for ranks in (average_ranks(ours), average_ranks(teacher)))
    norms = mine.norm(dim=-1) * theirs.norm(dim=-1)
    return torch.where(norms > 0, (mine * theirs).sum(-1) / norms.clamp(min=1e-300), 0.0)


def average_ranks(values: Tensor) -> Tensor:
    """Ranks from 1 along the last axis, float64; equal values share the mean of theirs."""
    values = values.contiguous()
    ordered = values.sort(-1).values
    below = torch.searchsorted(ordered, values, right=False)  # values smaller than this one
    up_to = torch.searchsorted(ordered, values, right=True)  # and those that equal it
    return (below + up_to + 1).double() / 2
