"""The physical K and V of one layer: rectangular (`DenseStorage`), or ragged by row and head (`RaggedStorage`).

The attention mask covers the *columns* of a storage: all of a dense storage, and the tail of a ragged one. The kept
block of a ragged storage lies before every later query and needs no mask. Buffers are allocated outside of inference
mode, because a tensor that is made in inference mode cannot be written later under ``no_grad``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

#: Batch rows: a slice if they are consecutive, else their indices.
Members = slice | Tensor

#: Room that may stay unused when a storage grows: this many tokens or this share of them, whichever is more.
SLACK_TOKENS = 16
SLACK_SHARE = 0.03


def plain_tensors(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function run without autograd and outside of inference mode."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return wrapper


def own(tensor: Tensor) -> Tensor:
    """``tensor``, detached, contiguous, writable outside of inference mode, and with no larger buffer behind it."""
    tensor = tensor.detach().contiguous()
    if tensor.is_inference() or tensor.untyped_storage().nbytes() > tensor.nbytes:
        tensor = tensor.clone()
    return tensor


class DenseStorage:
    """K `[B, H, N, D]` and V `[B, H, N, Dv]` of one layer, which grow in place within a buffer.

    Args:
        keys: `[B, H, N, D]`.
        values: `[B, H, N, Dv]`.
    """

    @plain_tensors
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys = own(keys)
        self._values = own(values)
        self.length = keys.shape[2]
        self._shared = False

    @property
    def keys(self) -> Tensor:
        """`[B, H, N, D]`, a view."""
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """`[B, H, N, Dv]`, a view."""
        return self._values[:, :, : self.length]

    @plain_tensors
    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add the columns K `[B, H, q, D]` and V `[B, H, q, Dv]`."""
        length = self.length + keys.shape[2]
        if length > self._keys.shape[2] or self._shared:
            slack = max(SLACK_TOKENS, int(SLACK_SHARE * length))
            self._keys = self._grown(self.keys, length + slack)
            self._values = self._grown(self.values, length + slack)
            self._shared = False
        self._keys[:, :, self.length : length] = keys
        self._values[:, :, self.length : length] = values
        self.length = length

    @staticmethod
    def _grown(old: Tensor, columns: int) -> Tensor:
        new = old.new_empty(*old.shape[:2], columns, old.shape[3])
        new[:, :, : old.shape[2]] = old
        return new

    def crop(self, columns: int) -> None:
        """Remove the last ``columns`` columns."""
        self.length -= columns

    @plain_tensors
    def select(self, rows: Tensor) -> None:
        """Keep the batch rows ``rows`` `[B']`, in that order. A row may come several times."""
        rows = rows.to(self._keys.device)
        self._keys = self._keys.index_select(0, rows)
        self._values = self._values.index_select(0, rows)
        self._shared = False

    def fork(self) -> DenseStorage:
        """A storage with the same columns. Whichever of the two grows first copies them."""
        twin = object.__new__(DenseStorage)
        twin._keys, twin._values, twin.length = self._keys, self._values, self.length
        self._shared = twin._shared = True
        return twin

    @classmethod
    @plain_tensors
    def empty(cls, keys: Tensor, values: Tensor, keep: Tensor) -> DenseStorage:
        """Unfilled storage for the columns that ``keep`` marks and for all later ones, see `fill`.

        Args:
            keys: `[B, H, N, D]`.
            values: `[B, H, N, Dv]`.
            keep: `[R, H, N']`, bool, ``N' <= N``, with the same number of marks for every row and head.
        """
        room = (*keys.shape[:2], int(keep[0, 0].sum()) + keys.shape[2] - keep.shape[2])
        return cls(keys.new_empty(*room, keys.shape[3]), values.new_empty(*room, values.shape[3]))

    @plain_tensors
    def fill(self, keys: Tensor, values: Tensor, keep: Tensor, rows: Tensor) -> None:
        """Copy in the columns that ``keep`` marks, and all later ones. In every row and head they must fill the room.

        Args:
            keys: `[B, H, N, D]`.
            values: `[B, H, N, Dv]`.
            keep: `[R, H, N']`, bool, ``N' <= N``. All later columns are kept.
            rows: `[B]`, the row of ``keep`` that each batch row follows.
        """
        distinct, heads, prompt = keep.shape
        places = keep.nonzero()[:, 2].view(distinct, heads, -1)  # [R, H, K], ascending
        later = torch.arange(prompt, keys.shape[2], device=places.device).expand(distinct, heads, -1)
        places = torch.cat([places, later], dim=2).to(keys.device)
        places = places.index_select(0, rows.to(places.device)).unsqueeze(-1)  # [B, H, K, 1]
        torch.gather(keys, 2, places.expand(-1, -1, -1, keys.shape[3]), out=self._keys)
        torch.gather(values, 2, places.expand(-1, -1, -1, values.shape[3]), out=self._values)

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that hold memory."""
        yield from (self._keys, self._values)


@dataclass(frozen=True)
class RaggedBlock:
    """The kept K and V of R distinct rows, each head with its own length. Never written after it is filled.

    Args:
        keys: `[T, D]`, row after row, head after head, with ascending positions.
        values: `[T, Dv]`, in the same order.
        lengths: `[R][H]`, how many of the T KV pairs belong to each row and head.
    """

    keys: Tensor
    values: Tensor
    lengths: tuple[tuple[int, ...], ...]

    @classmethod
    @plain_tensors
    def empty(cls, keys: Tensor, values: Tensor, lengths: tuple[tuple[int, ...], ...]) -> RaggedBlock:
        """An unfilled block of these ``lengths``, with the head dims and dtypes of ``keys`` and ``values``."""
        total = sum(map(sum, lengths))
        return cls(keys.new_empty(total, keys.shape[3]), values.new_empty(total, values.shape[3]), lengths)

    @plain_tensors
    def fill(self, keys: Tensor, values: Tensor, keep: Tensor, representatives: Sequence[int]) -> None:
        """Copy in the columns that ``keep`` marks. No more memory is allocated than for the indices of one head.

        Args:
            keys: `[B, H, N, D]`.
            values: `[B, H, N, Dv]`.
            keep: `[R, H, N]`, bool, with as many marks for each row and head as ``lengths`` says.
            representatives: R batch rows, one for each distinct row.
        """
        keep = keep.to(keys.device)
        for distinct, batch_row in enumerate(representatives):
            for head, (kept_keys, kept_values) in enumerate(self.heads[distinct]):
                places = keep[distinct, head].nonzero()[:, 0]
                torch.index_select(keys[batch_row, head], 0, places, out=kept_keys)
                torch.index_select(values[batch_row, head], 0, places, out=kept_values)

    @functools.cached_property
    def heads(self) -> tuple[tuple[tuple[Tensor, Tensor], ...], ...]:
        """`[R][H]`: views of K `[K, D]` and V `[K, Dv]` for each head of each distinct row."""
        lengths = [length for row in self.lengths for length in row]
        pairs = iter(zip(self.keys.split(lengths), self.values.split(lengths), strict=True))
        return tuple(tuple(next(pairs) for _ in row) for row in self.lengths)


class RaggedStorage:
    """A kept block, which copies of a row and forks share, and a dense tail of later columns.

    Args:
        block: The KV pairs that were kept.
        rows: `[B]`, the row of the block that each batch row reads.
        tail: The later columns of the B batch rows.
    """

    def __init__(self, block: RaggedBlock, rows: Tensor, tail: DenseStorage) -> None:
        self.block = block
        self.rows = rows
        self.tail = tail
        self._members: list[tuple[int, Members]] | None = None

    @property
    def members(self) -> list[tuple[int, Members]]:
        """Each distinct row in use, and the batch rows that read it. One pass over the distinct row serves them all."""
        if self._members is None:
            self._members = []
            for row in self.rows.unique().tolist():
                places = (self.rows == row).nonzero()[:, 0]
                first, last = int(places[0]), int(places[-1])
                together = last - first + 1 == len(places)
                self._members.append((row, slice(first, last + 1) if together else places.to(self.keys.device)))
        return self._members

    @classmethod
    @plain_tensors
    def empty(cls, keys: Tensor, values: Tensor, keep: Tensor, rows: Tensor) -> RaggedStorage:
        """Unfilled storage for the columns that ``keep`` marks, see `fill`.

        Args:
            keys: `[B, H, N, D]`.
            values: `[B, H, N, Dv]`.
            keep: `[R, H, N']`, bool.
            rows: `[B]`, the distinct row of each batch row.
        """
        block = RaggedBlock.empty(keys, values, tuple(map(tuple, keep.sum(2).tolist())))
        _ = block.heads  # makes all views now
        return cls(block, rows, DenseStorage(keys[:, :, :0], values[:, :, :0]))

    def fill(self, keys: Tensor, values: Tensor, keep: Tensor, representatives: Sequence[int]) -> None:
        """Copy the columns that ``keep`` marks into the block, and all later ones into the tail.

        Args:
            keys: `[B, H, N, D]`.
            values: `[B, H, N, Dv]`.
            keep: `[R, H, N']`, bool, ``N' <= N``. Columns from N' on go to the tail.
            representatives: R batch rows, one for each distinct row.
        """
        prompt = keep.shape[2]
        self.block.fill(keys[:, :, :prompt], values[:, :, :prompt], keep, representatives)
        if keys.shape[2] > prompt:
            self.tail = DenseStorage(keys[:, :, prompt:], values[:, :, prompt:])

    @classmethod
    @plain_tensors
    def share(cls, dense: DenseStorage) -> RaggedStorage:
        """All columns of ``dense`` as a block that copies of a row can share. Nothing is copied if it has no slack."""
        keys, values = dense.keys, dense.values
        batch, heads, columns, _ = keys.shape
        lengths = ((columns,) * heads,) * batch
        block = RaggedBlock(keys.reshape(-1, keys.shape[3]), values.reshape(-1, values.shape[3]), lengths)
        return cls(block, torch.arange(batch), DenseStorage(keys[:, :, columns:], values[:, :, columns:]))

    @property
    def length(self) -> int:
        """Number of columns of the tail."""
        return self.tail.length

    @property
    def keys(self) -> Tensor:
        """`[B, H, T, D]`, K of the tail."""
        return self.tail.keys

    @property
    def values(self) -> Tensor:
        """`[B, H, T, Dv]`, V of the tail."""
        return self.tail.values

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add the columns K `[B, H, q, D]` and V `[B, H, q, Dv]` to the tail."""
        self.tail.append(keys, values)

    def crop(self, columns: int) -> None:
        """Remove the last ``columns`` columns of the tail."""
        self.tail.crop(columns)

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows ``rows`` `[B']`. The block is not copied."""
        self.rows = self.rows[rows.to(self.rows.device)]
        self._members = None
        self.tail.select(rows)

    def fork(self) -> RaggedStorage:
        """A storage with the same columns, which shares the block for good and the tail until one of them grows."""
        return RaggedStorage(self.block, self.rows, self.tail.fork())

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that hold memory."""
        yield from (self.block.keys, self.block.values, *self.tail.tensors())


def storage_bytes(tensors: Iterator[Tensor] | Sequence[Tensor]) -> int:
    """Bytes of the memory behind ``tensors``. Memory that they share counts once."""
    storages = {(t.device, t.untyped_storage().data_ptr()): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
