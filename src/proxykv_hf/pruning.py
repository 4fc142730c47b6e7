"""From scores to smaller layers: what is kept of a batch, and the layers made of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import ProxyKVWarning
from .layers import PrunedLayer
from .prompt import Prompt
from .retention import RetentionPolicy, select
from .storage import DenseStorage, RaggedStorage, plain_tensors


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
        self._rooms: dict[int, tuple[Tensor, Tensor]] = {}

    @plain_tensors
    def reserve(self, keys: Tensor, values: Tensor, place: int) -> None:
        """Allocate what this layer and the later ones keep, before the forward goes on.

        Small tensors that stay, made between large ones that come and go, break up an allocator's free memory:
        Qwen2.5-1.5B's process grew by 15 MB a layer at 1,024 tokens on a CPU, of which under 1 MB was kept.

        Args:
            keys: `[B, H, N, D]`, the layer's fresh ones; the later layers' are taken to be like them.
            values: `[B, H, N, Dv]`.
            place: Of the layer among the full-attention layers.
        """
        if not self._rooms:
            for later, kept in enumerate(self._keep[:, place:].sum((0, 2, 3)).tolist(), start=place):
                rows, heads = self._keep.shape[0], self._keep.shape[2]
                shape = (kept,) if self._ragged else (*keys.shape[:2], kept // (rows * heads))
                self._rooms[later] = (keys.new_empty(*shape, keys.shape[3]), values.new_empty(*shape, values.shape[3]))

    def _room(self, place: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """What was reserved for a layer, if it is like what was expected."""
        room = self._rooms.pop(place, None)
        fits = room is not None and all(
            (ours.shape[-1], ours.dtype, ours.device) == (fresh.shape[-1], fresh.dtype, fresh.device)
            for ours, fresh in zip(room, (keys, values), strict=True)
        )
        return room if fits else None

    def prune(self, place: int, index: int, keys: Tensor, values: Tensor) -> PrunedLayer:
        """The layer of what is kept.

        Args:
            place: Of the layer among the full-attention layers.
            index: Of the layer in the model.
            keys: `[B, H, N, D]`, the whole layer's.
            values: `[B, H, N, Dv]`.
        """
        keep = self._keep[:, place]
        prompt = keep.shape[2]
        room = self._room(place, keys, values)
        if self._ragged:
            storage = RaggedStorage.gather(keys, values, keep, self._rows, self._representatives, room)
            return PrunedLayer(index, storage, offset=prompt)
        kept = int(keep[0, 0].sum())
        dense = DenseStorage.gather(keys, values, keep, self._rows, room)
        return PrunedLayer(index, dense, offset=prompt - kept, fixed=kept)


def warn_over_budget(pairs: int) -> None:
    """The one warning for a budget that protection does not fit in, if any pairs are kept beyond it."""
    if pairs:
        warnings.warn(
            f"sinks, recent and protected tokens do not fit in the budget: {pairs} KV pairs more are kept",
            ProxyKVWarning,
            stacklevel=3,
        )
