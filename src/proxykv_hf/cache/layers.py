"""A full-attention layer of the cache: what it stores, what it has seen, and its part in the attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import DynamicLayer, DynamicSlidingWindowLayer
from ..attention.functions import AttentionCall, AttentionOutput, hand_over, take_hidden
from ..attention.lease import Lease
from ..errors import CacheStateError
from ..geometry import ModelGeometry
from ..scorers.base import Observation
from .ragged import ragged_attention
from .storage import DenseStorage, RaggedStorage
from .weights import ragged_weights, spread_weights

Watch = Callable[[Observation], None]


def new_layers(geometry: ModelGeometry) -> list[Any]:
    """Empty layers for a target: a `PrunedLayer` for full attention, transformers' own layer for a sliding window."""
    return [
        PrunedLayer(index) if window is None else DynamicSlidingWindowLayer(sliding_window=window)
        for index, window in enumerate(geometry.sliding_windows)
    ]


def can_crop_window(layer: DynamicSlidingWindowLayer, count: int) -> bool:
    """Whether a sliding-window layer holds all that its window needs after the last ``count`` tokens are removed."""
    assert layer.keys is not None
    seen, stored = layer.get_seq_length(), layer.keys.shape[2]
    full = seen < layer.sliding_window or layer.record_past
    return full and stored - count >= min(seen - count, layer.sliding_window - 1)


class PrunedLayer(DynamicLayer):
    """A full-attention layer that may keep fewer tokens than it has seen.

    The attention mask that the model builds covers the columns of the storage: everything that a rectangular layer
    keeps, and only what came after the prune in a ragged layer. The ``offset`` columns before them also count as seen,
    so positions stay true.

    Args:
        index: The layer's index in the model.
        storage: What the layer holds; None while it is empty.
        offset: Number of columns that were seen but that the mask does not cover.
        fixed: Number of columns at the start that a prune left and that cannot be cropped.
        lease: The layer's share in the model's attention, if the layer is part of a plain `DynamicCache`.
    """

    def __init__(
        self,
        index: int,
        storage: DenseStorage | RaggedStorage | None = None,
        offset: int = 0,
        fixed: int = 0,
        lease: Lease | None = None,
    ) -> None:
        self.index = index
        self.lease = lease
        self.storage = storage
        self.offset = offset
        self.fixed = fixed
        self.watch: Watch | None = None
        self.places: Tensor | None = None
        """`[B, H, P]`, bool, the prompt columns that each head keeps. Set for forwards that return attentions."""

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.storage is not None

    def _dense(self) -> DenseStorage | None:
        if isinstance(self.storage, RaggedStorage):
            raise CacheStateError(
                f"layer {self.index} is ragged: its heads keep different numbers of tokens, so there is no single "
                "tensor of keys or values; kept_pairs() of the cache gives them head by head, and with "
                "allocation='uniform' there is one tensor"
            )
        return self.storage

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """`[B, H, K, D]`, a view; None while the layer is empty.

        Raises:
            CacheStateError: The layer is ragged.
        """
        dense = self._dense()
        return None if dense is None else dense.keys

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """`[B, H, K, Dv]`, a view; None while the layer is empty. See ``keys`` for the error."""
        dense = self._dense()
        return None if dense is None else dense.values

    @property
    def columns(self) -> int:
        """Number of columns that the attention mask covers."""
        return 0 if self.storage is None else self.storage.length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store K `[B, H, q, D]` and V `[B, H, q, Dv]`; return the K and V to pass to the attention function."""
        if self.storage is None:
            self.storage = DenseStorage(key_states, value_states)
        else:
            self.storage.append(key_states, value_states)
        keys, values = self.storage.keys, self.storage.values
        if self.watch is not None or self.places is not None or isinstance(self.storage, RaggedStorage):
            hand_over(keys, values, self)
        return keys, values

    def attend(self, call: AttentionCall) -> AttentionOutput:
        """See `attention.functions.AttendingLayer`."""
        call.check()
        if self.watch is not None:
            self.watch(
                Observation(
                    layer=self.index,
                    query=call.query.detach(),
                    key=call.key,
                    hidden=take_hidden(),
                    scaling=call.scaling,
                    softcap=call.softcap,
                    columns=call.key.shape[2],
                    sinks=call.sinks,
                )
            )
        if not isinstance(self.storage, RaggedStorage):
            output, weights = call.by_backend()
            if weights is not None and self.places is not None and self.offset:
                weights = spread_weights(weights, self.places)
            return output, weights
        arguments = (call.query, self.storage, call.attention_mask, call.scaling, call.softcap, call.sinks)
        weights = None
        if self.places is not None:  # the block may hold later tokens too, see `share_rows`
            later = self.offset - self.places.shape[2]
            weights = ragged_weights(*arguments, nn.functional.pad(self.places, (0, later), value=True))
        return ragged_attention(*arguments), weights

    def pairs(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """For each head, K `[K, D]` and V `[K, Dv]` of everything that the layer holds for a batch row."""
        storage = self.storage
        if storage is None:
            return []
        later = list(zip(storage.keys[row], storage.values[row], strict=True))
        if isinstance(storage, DenseStorage):
            return later
        block = storage.block.heads[int(storage.rows[row])]
        return [
            (torch.cat([keys, late_keys]), torch.cat([values, late_values]))
            for (keys, values), (late_keys, late_values) in zip(block, later, strict=True)
        ]

    def share_rows(self) -> None:
        """Let copies of a row share all that the layer holds. It cannot be cropped any more."""
        if isinstance(self.storage, DenseStorage):
            self.offset += self.storage.length
            self.fixed = 0
            self.storage = RaggedStorage.share(self.storage)

    def fork(self) -> PrunedLayer:
        """An independent layer that shares memory with this one until one of them is written."""
        storage = None if self.storage is None else self.storage.fork()
        return PrunedLayer(self.index, storage, self.offset, self.fixed, self.lease)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Number of tokens (columns) seen."""
        return self.offset + self.columns

    def get_mask_sizes(self, query_length: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Number of columns that the mask covers with ``query_length`` new ones, and the position of the first."""
        return self.columns + query_length, self.offset

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Empty the layer."""
        self.storage, self.offset, self.fixed, self.watch = None, 0, 0, None

    def crop(self, tokens_to_remove: int, *args: Any, **kwargs: Any) -> None:
        """Remove the last ``-tokens_to_remove`` columns.

        Raises:
            CacheStateError: Some of these columns lie in the pruned part.
        """
        self.check_crop(-tokens_to_remove)
        if self.storage is not None:
            self.storage.crop(-tokens_to_remove)

    def check_crop(self, count: int) -> None:
        """Raise `CacheStateError` if the last ``count`` columns reach into the pruned part."""
        room = self.columns - self.fixed
        if count > room:
            what = "the pruned part of the prompt" if self.offset else "the start of the cache"
            raise CacheStateError(
                f"cannot crop {count} of {self.get_seq_length()} tokens: only the last {room} lie after {what}; call "
                "reset() and prefill again"
            )

    def batch_select_indices(self, indices: Tensor, *args: Any, **kwargs: Any) -> None:
        """Keep the batch rows ``indices``."""
        if self.storage is not None:
            self.storage.select(indices)

    def batch_repeat_interleave(self, repeats: int, *args: Any, **kwargs: Any) -> None:
        """Repeat each batch row."""
        if self.storage is not None:
            self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Tensor, *args: Any, **kwargs: Any) -> None:
        """Reorder batch rows, for beam search."""
        self.batch_select_indices(beam_idx)

    @property
    def batch(self) -> int:
        """B, the number of batch rows; 0 while the layer is empty."""
        return 0 if self.storage is None else self.storage.keys.shape[0]

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that hold memory."""
        return iter(()) if self.storage is None else self.storage.tensors()
