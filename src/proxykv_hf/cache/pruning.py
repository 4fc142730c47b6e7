"""From scores to smaller layers: what is kept of a batch, and the layers made of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ProxyKVWarning
from .layers import PrunedLayer
from .prompt import Prompt
from .retention import RetentionPolicy, select
from .storage import DenseStorage, RaggedStorage, storage_bytes

#: Is told how many bytes are held beside the cache.
Held = Callable[[int], None]


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
        rows: `[B]`, the distinct row of each batch row.
        ragged: See `is_ragged`.
        full_layers: `[L_full]`, the index of each full-attention layer in the model.
    """

    def __init__(self, keep: Tensor, rows: Tensor, ragged: bool, full_layers: Sequence[int]) -> None:
        present = rows.unique().tolist()  # a reordered batch may have lost rows
        self._keep = keep[present]
        self._rows = torch.searchsorted(torch.tensor(present), rows)
        self._representatives = [int((self._rows == row).nonzero()[0]) for row in range(len(present))]
        self._batch = len(rows)
        self._ragged = ragged
        self._full_layers = full_layers
        self._reserved: dict[int, DenseStorage | RaggedStorage] = {}

    def prune_filled(self, layers: list[Any], held: Held) -> None:
        """Replace, one after another, the layers that hold the whole prompt.

        Args:
            layers: The cache's.
            held: Is told how many bytes are held beside the cache, before each layer is replaced.
        """
        for index in self._full_layers:
            layer = layers[index]
            if layer.storage is not None and not layer.offset:
                rows = (self._batch, -1, -1, -1)  # one row may be pruned in several ways
                pruned = self.prune(index, layer.storage.keys.expand(rows), layer.storage.values.expand(rows))
                held(storage_bytes(pruned.tensors()))
                layers[index] = pruned

    def prune_fresh(
        self,
        layers: list[Any],
        index: int,
        keys: Tensor,
        values: Tensor,
        devices: Callable[[], Sequence[torch.device | None]],
        held: Held,
    ) -> None:
        """Fill an empty layer with what is kept of its fresh K `[B, H, N, D]` and V `[B, H, N, Dv]`.

        Args:
            layers: See `prune_filled`.
            index: The layer's.
            keys: The forward's own.
            values: Likewise.
            devices: See `_reserve`.
            held: See `prune_filled`.
        """
        self._reserve(index, keys, values, devices)
        pruned = self.prune(index, keys, values)
        held(storage_bytes(pruned.tensors()) + keys.nbytes + values.nbytes)
        layers[index] = pruned

    def _reserve(
        self, index: int, keys: Tensor, values: Tensor, devices: Callable[[], Sequence[torch.device | None]]
    ) -> None:
        """Allocate what this layer and the later ones on its device keep, before the forward goes on.

        A small tensor that stays, made between large tensors that come and go, breaks up an allocator's free memory:
        the process of Qwen2.5-1.5B on a CPU grew by a hidden state a layer, many times what was kept.

        Args:
            index: The layer's.
            keys: `[B, H, N, D]`, its fresh ones; the later layers' are taken to be like them.
            values: `[B, H, N, Dv]`.
            devices: Tells where each full-attention layer computes, None where that is not known; called once a
                device.
        """
        place = self._full_layers.index(index)
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

    def prune(self, index: int, keys: Tensor, values: Tensor) -> PrunedLayer:
        """The layer of what is kept.

        Args:
            index: The layer's place in the model.
            keys: `[B, H, N, D]`, the whole layer's.
            values: `[B, H, N, Dv]`.
        """
        place = self._full_layers.index(index)
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
