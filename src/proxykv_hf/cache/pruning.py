"""From scores to smaller layers: what is kept of a batch, and the layers made of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import ProxyKVWarning
from .layers import PrunedLayer
from .prompt import Prompt
from .retention import RetentionPolicy, select
from .storage import DenseStorage, RaggedStorage


def keep_masks(scores: Tensor, prompt: Prompt, policies: Sequence[RetentionPolicy]) -> tuple[Tensor, int]:
    """Scores `[R, L, H, P]` of the full-attention layers to the kept mask of the same shape.

    Each row has its own of the R ``policies``. Padding is never kept. The number is that of the pairs kept beyond the
    budget.
    """
    keep = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    over_budget = 0
    for row, (pad, context, policy) in enumerate(zip(prompt.pads, prompt.contexts, policies, strict=True)):
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


class Pruner:
    """Makes pruned layers of whole ones.

    Args:
        keep: `[R, L_full, H, P]`, bool, over the prompt's columns; later columns are all kept.
        rows: `[B]`, each batch row's distinct row.
        ragged: See `is_ragged`.
    """

    def __init__(self, keep: Tensor, rows: Tensor, ragged: bool) -> None:
        present = rows.unique().tolist()  # a reordered batch may have lost rows
        self._keep = keep[present]
        self._rows = torch.searchsorted(torch.tensor(present), rows)
        self._representatives = [int((self._rows == row).nonzero()[0]) for row in range(len(present))]
        self._ragged = ragged
        self._reserved: dict[int, DenseStorage | RaggedStorage] = {}

    def reserve(
        self, keys: Tensor, values: Tensor, place: int, devices: Callable[[], Sequence[torch.device | None]]
    ) -> None:
        """Allocate what this layer and the later ones on its device keep, before the forward goes on.

        What stays, however small, made between large tensors that come and go, breaks up an allocator's free memory:
        the process of Qwen2.5-1.5B on a CPU grew by a hidden state a layer, many times what was kept.

        Args:
            keys: `[B, H, N, D]`, the layer's fresh ones; the later layers' are taken to be like them.
            values: `[B, H, N, Dv]`.
            place: Of the layer among the full-attention layers.
            devices: Where each of these computes, or None where that is not known; asked once a device.
        """
        if place not in self._reserved:
            here = (keys.device, None)
            later = [other for other, device in enumerate(devices()) if other > place and device in here]
            for other in (place, *later):
                self._reserved[other] = self._empty(keys, values, self._keep[:, other])

    def _empty(self, keys: Tensor, values: Tensor, keep: Tensor) -> DenseStorage | RaggedStorage:
        """Room for what ``keep`` `[R, H, P]` marks, and in a dense one for all later columns."""
        if self._ragged:
            return RaggedStorage.empty(keys, values, keep, self._rows)
        return DenseStorage.empty(keys, values, keep)

    def prune(self, place: int, index: int, keys: Tensor, values: Tensor) -> PrunedLayer:
        """The layer of what is kept.

        Args:
            place: Of the layer among the full-attention layers.
            index: Of the layer in the model.
            keys: `[B, H, N, D]`, the whole layer's.
            values: `[B, H, N, Dv]`.
        """
        keep = self._keep[:, place]
        storage = self._reserved.pop(place, None)
        if storage is None or not _alike(storage, keys, values):
            storage = self._empty(keys, values, keep)
        prompt = keep.shape[2]
        if isinstance(storage, RaggedStorage):
            storage.fill(keys, values, keep, self._representatives)
            return PrunedLayer(index, storage, offset=prompt)
        storage.fill(keys, values, keep, self._rows)
        kept = int(keep[0, 0].sum())
        return PrunedLayer(index, storage, offset=prompt - kept, fixed=kept)


def _alike(storage: DenseStorage | RaggedStorage, keys: Tensor, values: Tensor) -> bool:
    """Whether room that was made for another layer suits this one's K and V."""
    return all(
        (ours.shape[-1], ours.dtype, ours.device) == (fresh.shape[-1], fresh.dtype, fresh.device)
        for ours, fresh in zip((storage.keys, storage.values), (keys, values), strict=True)
    )


def warn_over_budget(pairs: int) -> None:
    """The one warning for a budget that protection does not fit in, if any pairs are kept beyond it."""
    if pairs:
        warnings.warn(
            f"sinks, recent and protected tokens do not fit in the budget: {pairs} KV pairs more are kept",
            ProxyKVWarning,
            stacklevel=3,
        )
