"""How well scores agree with the teacher's: the metrics of training, and the head prior as the baseline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Retention ratios at which agreement is measured, and which the mapper's card lists.
RATIOS = (0.1, 0.2, 0.3, 0.5)


def measure(ours: Tensor, teacher: Tensor) -> dict[str, float]:
    """All metrics of one document.

    - ``head@rho``, ``global@rho``: the share of the teacher's Top-K that is also in our Top-K, within each head (mean
      over heads) and over all heads;
    - ``mass@rho``: the share of the teacher's total score that our Top-K over all heads keeps;
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
    """The mean of each metric over documents, with equal weights."""
    return {name: sum(found[name] for found in documents) / len(documents) for name in documents[0]}


def mean_agreement(found: dict[str, float]) -> float:
    """The number that the best epoch is chosen by: the mean of ``head@`` and ``global@`` over all ratios."""
    values = [value for name, value in found.items() if name.startswith(("head@", "global@"))]
    return sum(values) / len(values)


def describe(found: dict[str, float]) -> str:
    """The agreement at each ratio and its mean, as a line of text."""
    values = [f"{name} {value:.3f}" for name, value in found.items() if name.startswith(("head@", "global@"))]
    return f"{' '.join(values)} mean {mean_agreement(found):.4f}"


def gain(found: dict[str, float], baseline: dict[str, float]) -> dict[str, float]:
    """How much higher each metric is than a baseline's, for example the head prior's; a difference, not a ratio."""
    return {name: value - baseline[name] for name, value in found.items()}


def prior_scores(prior: Tensor, tokens: int, generator: torch.Generator) -> Tensor:
    """The scores of the head prior: each head's mean, regardless of the text.

    With equal scores, the Top-K would follow the order of the text, so a little noise breaks the ties.

    Args:
        prior: `[L, H]`, log scale.
        tokens: n.
        generator: On the CPU.

    Returns: `[L, H, n]`, log scale.
    """
    return prior[..., None] + 1e-4 * torch.rand(*prior.shape, tokens, generator=generator)


def overlap(ours: Tensor, theirs: Tensor, ratio: float) -> float:
    """``|our Top-K and their Top-K| / K`` along the last axis, mean over the other axes."""
    keep = max(1, round(ratio * ours.shape[-1]))
    chosen = torch.zeros_like(ours).scatter_(-1, ours.topk(keep).indices, 1.0)
    return float(chosen.gather(-1, theirs.topk(keep).indices).mean())


def retained_mass(ours: Tensor, teacher: Tensor, ratio: float) -> float:
    """The share of the teacher's total score that our Top-K over all heads keeps."""
    mass = teacher.flatten().double().exp()
    keep = max(1, round(ratio * len(mass)))
    return float(mass[ours.flatten().topk(keep).indices].sum() / mass.sum())


def spearman(ours: Tensor, teacher: Tensor) -> Tensor:
    """Spearman's rank correlation along the last axis, with mean ranks for ties; 0 where one of both is constant.

    Both arguments are `[..., n]`; returns `[...]`.
    """
    mine, theirs = (ranks - ranks.mean(-1, keepdim=True) for ranks in (average_ranks(ours), average_ranks(teacher)))
    norms = mine.norm(dim=-1) * theirs.norm(dim=-1)
    return torch.where(norms > 0, (mine * theirs).sum(-1) / norms.clamp(min=1e-300), 0.0)


def average_ranks(values: Tensor) -> Tensor:
    """Ranks from 1 along the last axis, float64; equal values get the mean of their ranks."""
    values = values.contiguous()
    ordered = values.sort(-1).values
    below = torch.searchsorted(ordered, values, right=False)  # values smaller than this one
    up_to = torch.searchsorted(ordered, values, right=True)  # and values that equal it
    return (below + up_to + 1).double() / 2
