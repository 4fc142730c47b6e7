"""From scores to smaller layers: the kept mask of a batch, and the layers that are pruned by it."""

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

#: Is called with the number of bytes that are held beside the cache.
Held = Callable[[int], None]


def keep_masks(scores: Tensor, prompt: Prompt, policies: Sequence[RetentionPolicy]) -> tuple[Tensor, int]:
    """Choose the KV pairs of full-attention layers that are kept. Padding is never kept.

    Args:
        scores: `[R, L_full, H, P]`, the scores of the full-attention layers.
        prompt: The prompt's R distinct rows.
        policies: R policies, one for each row.

    Returns: the kept mask `[R, L_full, H, P]`, bool, and the number of KV pairs that are kept beyond the budget.
    """
    keep = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    over_budget = 0
    for row, (pad, context, policy) in enumerate(zip(prompt.pads, prompt.contexts, policies, strict=True)):
        selection = select(scores[row, :, :, pad:], policy, context)
        keep[row, :, :, pad:] = selection.keep
        over_budget += selection.over_budget
    return keep, over_budget


def is_ragged(keep: Tensor, prompt: Prompt) -> bool:
    """Whether a kept mask `[R, L_full, H, P]` needs ragged layers. Then all layers are ragged: one mask must fit all.

    A padded prompt needs them too: padding is never kept, but in a rectangular layer the attention mask covers it.
    """
    counts = keep.sum(-1)
    return prompt.padded or bool((counts != counts.flatten()[0]).any())


class Pruner:
    """Makes pruned layers from whole layers.

    Args:
        keep: `[R, L_full, H, P]`, bool, the kept mask of the prompt's columns. All later columns are kept.
        rows: `[B]`, the distinct row of each batch row.
        ragged: Whether the pruned layers are ragged, see `is_ragged`.
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
        """Prune the layers that hold the whole prompt, one after another.

        Args:
            layers: The cache's layers, which are replaced in this list.
            held: Is called before each layer is replaced, with the bytes that the pruned layer takes.
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
        """Fill an empty layer with what is kept of the K and V that a forward has just computed.

        Args:
            layers: The cache's layers, in which the empty one is replaced.
            index: The layer's index in the model.
            keys: `[B, H, N, D]`, K of the forward.
            values: `[B, H, N, Dv]`, V of the forward.
            devices: Returns the device of each full-attention layer, see `_reserve`.
            held: Is called before the layer is replaced, with the bytes of the pruned layer and of ``keys`` and
                ``values``.
        """
        self._reserve(index, keys, values, devices)
        pruned = self.prune(index, keys, values)
        held(storage_bytes(pruned.tensors()) + keys.nbytes + values.nbytes)
        layers[index] = pruned

    def _reserve(
        self, index: int, keys: Tensor, values: Tensor, devices: Callable[[], Sequence[torch.device | None]]
    ) -> None:
        """Allocate the storage of this layer and of the later layers on its device, before the forward goes on.

        A small tensor that stays, allocated between large tensors that come and go, fragments the allocator's free
        memory. With Qwen2.5-1.5B on a CPU, the process grew by one hidden state per layer, many times what was kept.

        Args:
            index: The layer's index in the model.
            keys: `[B, H, N, D]`, K that the layer has just computed. The later layers are expected to have the same
                shape and dtype.
            values: `[B, H, N, Dv]`, V that the layer has just computed.
            devices: Returns the device that each full-attention layer computes on, None where it is not known. Called
                once per device.
        """
        place = self._full_layers.index(index)
        if place not in self._reserved:
            here = (keys.device, None)
            later = [other for other, device in enumerate(devices()) if other > place and device in here]
            for other in (place, *later):
                self._reserved[other] = self._empty(keys, values, self._keep[:, other])

    def _empty(self, keys: Tensor, values: Tensor, keep: Tensor) -> DenseStorage | RaggedStorage:
        """Unfilled storage for the columns that ``keep`` `[R, H, P]` marks. A dense one has room for later columns."""
        if self._ragged:
            return RaggedStorage.empty(keys, values, keep, self._rows)
        return DenseStorage.empty(keys, values, keep)

    def prune(self, index: int, keys: Tensor, values: Tensor) -> PrunedLayer:
        """Make the pruned layer from a whole layer's K and V.

        Args:
            index: The layer's index in the model.
            keys: `[B, H, N, D]`, K of the whole layer.
            values: `[B, H, N, Dv]`, V of the whole layer.
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
    """Whether storage that was reserved for another layer fits this layer's K and V."""
    return all(
        (ours.shape[-1], ours.dtype, ours.device) == (fresh.shape[-1], fresh.dtype, fresh.device)
        for ours, fresh in zip((storage.keys, storage.values), (keys, values), strict=True)
    )


def warn_over_budget(pairs: int) -> None:
    """Warn if the protected tokens do not fit in the budget, so that ``pairs`` KV pairs are kept beyond it."""
    if pairs:
        warnings.warn(
            f"sinks, recent and protected tokens do not fit in the budget: {pairs} KV pairs more than that are kept",
            ProxyKVWarning,
            stacklevel=3,
        )
