"""The physical K and V of one layer: rectangular (`DenseStorage`), or ragged by row and head.

Both hold *columns* that attention's mask covers: all of a dense storage, and the tail of a ragged
one, whose kept block lies before every later query and needs no mask. Buffers are allocated outside
of inference mode, since a tensor born inside cannot be written later under ``no_grad``.
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

#: Batch rows: a slice where they lie together, else their numbers.
Members = slice | Tensor

#: Room that growing may leave unused: this many tokens or this share, whichever is more.
SLACK_TOKENS = 16
SLACK_SHARE = 0.03


def plain_tensors(function: Callable[P, R]) -> Callable[P, R]:
    """Run without autograd and outside of inference mode."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return wrapper


def own(tensor: Tensor) -> Tensor:
    """``tensor``, detached and contiguous, no larger buffer behind it, writable outside of inference mode."""
    tensor = tensor.detach().contiguous()
    if tensor.is_inference() or tensor.untyped_storage().nbytes() > tensor.nbytes:
        tensor = tensor.clone()
    return tensor


class DenseStorage:
    """K `[B, H, N, D]` and V `[B, H, N, Dv]`, growing in place within a buffer.

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
        """Add columns: `[B, H, q, D]` and `[B, H, q, Dv]`."""
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
        """Drop the last ``columns`` columns."""
        self.length -= columns

    @plain_tensors
    def select(self, rows: Tensor) -> None:
        """Keep the batch rows ``rows`` `[B']`, in that order, repeated where they repeat."""
        rows = rows.to(self._keys.device)
        self._keys = self._keys.index_select(0, rows)
        self._values = self._values.index_select(0, rows)
        self._shared = False

    def fork(self) -> DenseStorage:
        """A storage of the same columns; whichever of the two grows first makes its own copy."""
        twin = object.__new__(DenseStorage)
        twin._keys, twin._values, twin.length = self._keys, self._values, self.length
        self._shared = twin._shared = True
        return twin

    @classmethod
    @plain_tensors
    def empty(cls, keys: Tensor, values: Tensor, keep: Tensor) -> DenseStorage:
        """Room for what ``keep`` marks, the same number for every row and head, to be filled; see `fill`."""
        room = (*keys.shape[:2], int(keep[0, 0].sum()) + keys.shape[2] - keep.shape[2])
        return cls(keys.new_empty(*room, keys.shape[3]), values.new_empty(*room, values.shape[3]))

    @plain_tensors
    def fill(self, keys: Tensor, values: Tensor, keep: Tensor, rows: Tensor) -> None:
        """Take what ``keep`` marks, which must be as much as there is room for in every row and head.

        Args:
            keys: `[B, H, N, D]`.
            values: `[B, H, N, Dv]`.
            keep: `[R, H, N']`, bool, ``N' <= N``; later columns are all kept.
            rows: `[B]`, which row of ``keep`` each batch row follows.
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
    """Kept K and V of R distinct rows, each head with its own length; never written after it is filled.

    Args:
        keys: `[T, D]`: row after row, head after head, positions ascending.
        values: `[T, Dv]`.
        lengths: `[R][H]`, how many of the T belong to each row and head.
    """

    keys: Tensor
    values: Tensor
    lengths: tuple[tuple[int, ...], ...]

    @classmethod
    @plain_tensors
    def empty(cls, keys: Tensor, values: Tensor, lengths: tuple[tuple[int, ...], ...]) -> RaggedBlock:
        """Room for so much of such K `[B, H, N, D]` and V `[B, H, N, Dv]`, to be filled."""
        total = sum(map(sum, lengths))
        return cls(keys.new_empty(total, keys.shape[3]), values.new_empty(total, values.shape[3]), lengths)

    @plain_tensors
    def fill(self, keys: Tensor, values: Tensor, keep: Tensor, representatives: Sequence[int]) -> None:
        """Take what ``keep`` marks; no more than one head's indices is allocated.

        Args:
            keys: `[B, H, N, D]`.
            values: `[B, H, N, Dv]`.
            keep: `[R, H, N]`, bool, ``lengths`` in number.
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
        """`[R][H]`: K `[K, D]` and V `[K, Dv]` of each head of each distinct row, views."""
        lengths = [length for row in self.lengths for length in row]
        pairs = iter(zip(self.keys.split(lengths), self.values.split(lengths), strict=True))
        return tuple(tuple(next(pairs) for _ in row) for row in self.lengths)


class RaggedStorage:
    """A kept block, shared by copies of a row and by forks, and a dense tail of later columns.

    Args:
        block: What was kept.
        rows: `[B]`, the row of the block that each batch row reads.
        tail: B rows of later columns.
    """

    def __init__(self, block: RaggedBlock, rows: Tensor, tail: DenseStorage) -> None:
        self.block = block
        self.rows = rows
        self.tail = tail
        self._members: list[tuple[int, Members]] | None = None

    @property
    def members(self) -> list[tuple[int, Members]]:
        """Each distinct row that is in use, and the batch rows that read it: one pass over its block serves all."""
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
        """Room for what ``keep`` marks, to be filled, see `fill`; all its views are made.

        Args:
            keys: `[B, H, N, D]`.
            values: `[B, H, N, Dv]`.
            keep: `[R, H, N']`, bool.
            rows: `[B]`, the distinct row of each batch row.
        """
        block = RaggedBlock.empty(keys, values, tuple(map(tuple, keep.sum(2).tolist())))
        _ = block.heads
        return cls(block, rows, DenseStorage(keys[:, :, :0], values[:, :, :0]))

    def fill(self, keys: Tensor, values: Tensor, keep: Tensor, representatives: Sequence[int]) -> None:
        """Take what ``keep`` marks.

        Args:
            keys: `[B, H, N, D]`.
            values: `[B, H, N, Dv]`.
            keep: `[R, H, N']`, bool, ``N' <= N``; columns from N' on go to the tail.
            representatives: R batch rows, one for each distinct row.
        """
        prompt = keep.shape[2]
        self.block.fill(keys[:, :, :prompt], values[:, :, :prompt], keep, representatives)
        if keys.shape[2] > prompt:
            self.tail = DenseStorage(keys[:, :, prompt:], values[:, :, prompt:])

    @classmethod
    @plain_tensors
    def share(cls, dense: DenseStorage) -> RaggedStorage:
        """All of ``dense`` as a block that copies of its rows can share; not copied unless it has slack."""
        keys, values = dense.keys, dense.values
        batch, heads, columns, _ = keys.shape
        lengths = ((columns,) * heads,) * batch
        block = RaggedBlock(keys.reshape(-1, keys.shape[3]), values.reshape(-1, values.shape[3]), lengths)
        return cls(block, torch.arange(batch), DenseStorage(keys[:, :, columns:], values[:, :, columns:]))

    @property
    def length(self) -> int:
        """Columns of the tail."""
        return self.tail.length

    @property
    def keys(self) -> Tensor:
        """`[B, H, T, D]`: the tail's."""
        return self.tail.keys

    @property
    def values(self) -> Tensor:
        """`[B, H, T, Dv]`: the tail's."""
        return self.tail.values

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add columns to the tail: `[B, H, q, D]` and `[B, H, q, Dv]`."""
        self.tail.append(keys, values)

    def crop(self, columns: int) -> None:
        """Drop the tail's last ``columns`` columns."""
        self.tail.crop(columns)

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows ``rows`` `[B']`; the block is not copied."""
        self.rows = self.rows[rows.to(self.rows.device)]
        self._members = None
        self.tail.select(rows)

    def fork(self) -> RaggedStorage:
        """A storage that shares the block."""
        return RaggedStorage(self.block, self.rows, self.tail.fork())

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that hold memory."""
        yield from (self.block.keys, self.block.values, *self.tail.tensors())


def storage_bytes(tensors: Iterator[Tensor] | Sequence[Tensor]) -> int:
    """Bytes of the memory behind ``tensors``, memory that they share counted once."""
    storages = {(t.device, t.untyped_storage().data_ptr()): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
