"""From scores to smaller layers: what is kept of a batch, and the layers made of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .errors import ProxyKVWarning
from .layers import PrunedLayer
from .prompt import Prompt
from .retention import RetentionPolicy, select


def keep_masks(scores: Tensor, prompt: Prompt, policy: RetentionPolicy) -> tuple[Tensor, int]:
    """Scores `[R, L, H, P]` of the full-attention layers to the kept mask of the same shape.

    Padding is never kept. The number is that of the pairs kept beyond the budget.
    """
    keep = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    over_budget = 0
    for row, (pad, context) in enumerate(zip(prompt.pads, prompt.contexts, strict=True)):
        selection = select(scores[row, :, :, pad:], policy, context)
        keep[row, :, :, pad:] = selection.keep
        over_budget += selection.over_budget
    return keep, over_budget


def is_ragged(keep: Tensor, prompt: Prompt) -> bool:
    """Whether what is kept needs ragged layers: then all are, so that one mask fits every layer.

    Padding needs them too, since its columns are in the mask of a rectangular layer.
    """
    counts = keep.sum(-1)
    return prompt.padded or bool((counts != counts.flatten()[0]).any())


def prune_layers(
    layers: Iterable[PrunedLayer], keep: Tensor, rows: Tensor, ragged: bool
) -> Iterator[tuple[int, PrunedLayer]]:
    """Each layer's index and pruned twin.

    Args:
        layers: Whole ones.
        keep: `[R, L_full, H, P]`.
        rows: `[B]`, each batch row's distinct row.
        ragged: See `is_ragged`.
    """
    present = rows.unique().tolist()  # a reordered batch may have lost rows
    keep = keep[present]
    rows = torch.searchsorted(torch.tensor(present), rows)
    representatives = [int((rows == row).nonzero()[0]) for row in range(len(present))]
    for place, layer in enumerate(layers):
        yield layer.index, layer.pruned(keep[:, place], rows, representatives, ragged)


def warn_over_budget(pairs: int) -> None:
    """The one warning for a budget that protection does not fit in, if any pairs are kept beyond it."""
    if pairs:
        warnings.warn(
            f"sinks, recent and protected tokens do not fit in the budget: {pairs} KV pairs more are kept",
            ProxyKVWarning,
            stacklevel=3,
        )
