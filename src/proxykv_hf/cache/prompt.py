"""The rows of a prompt: which rows are copies, how long each row is, and which part of it may be evicted."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInputError

#: One span ``(start, stop)`` for all rows, or one per row, in the row's own positions (padding is not counted).
Context = tuple[int, int] | Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Prompt:
    """A prompt of R distinct rows and P columns. Copies of a row count once.

    The columns of a prompt, of scores and of a kept mask are always left-padded. The cache has its columns in the order
    of the model's input. ``order`` maps the one to the other if the mask has padding on the right, or holes.

    Args:
        columns: P, the number of columns.
        lengths: `[R]`, the number of tokens of each row. The columns before them are padding.
        contexts: `[R]`, the span of each row that may be evicted.
        next_positions: `[R]`, the position id that follows each row.
        input_ids: `[R, P]`, or None if the prompt came as embeddings.
        order: `[R, P]`, the cache's column for each column of the prompt; None if both are the same.
    """

    columns: int
    lengths: tuple[int, ...]
    contexts: tuple[tuple[int, int], ...]
    next_positions: tuple[int, ...]
    input_ids: Tensor | None
    order: Tensor | None = None

    @property
    def pads(self) -> tuple[int, ...]:
        """`[R]`, the number of padding columns of each row."""
        return tuple(self.columns - length for length in self.lengths)

    @property
    def padded(self) -> bool:
        """Whether any row has padding."""
        return any(self.pads)

    def in_cache(self, values: Tensor) -> Tensor:
        """Move values `[R, ..., P]` from the prompt's columns to the cache's columns."""
        if self.order is None:
            return values
        order = self.order.to(values.device).view(len(values), *(1,) * (values.ndim - 2), -1).expand_as(values)
        return torch.empty_like(values).scatter_(-1, order, values)

    def real(self) -> Tensor:
        """`[R, P]`, bool, which of the cache's columns hold a token of the row."""
        return self.in_cache(torch.arange(self.columns) >= torch.tensor(self.pads)[:, None])

    def own_columns(self, row: int) -> Tensor:
        """`[n]`, the cache's columns that hold the tokens of a distinct row, in the tokens' order."""
        columns = torch.arange(self.columns) if self.order is None else self.order[row]
        return columns[self.pads[row] :]

    def row_ids(self, row: int) -> Tensor:
        """The token ids `[n]` of a distinct row, without padding.

        Raises:
            InvalidInputError: The prompt came as embeddings.
        """
        if self.input_ids is None:
            raise InvalidInputError(
                "this scorer needs the prompt's input_ids, but the prompt came as inputs_embeds: pass "
                "input_ids, or use a scorer that reads the target's attention (SnapKVScorer)"
            )
        return self.input_ids[row, self.pads[row] :]

    def without_ids(self) -> Prompt:
        """The prompt without its token ids, to be stored with a cache."""
        return replace(self, input_ids=None)

    def repeated(self, row: int, times: int) -> Prompt:
        """A prompt of ``times`` copies of a distinct row, each a distinct row itself and without token ids."""
        return replace(
            self.without_ids(),
            lengths=self.lengths[row : row + 1] * times,
            contexts=self.contexts[row : row + 1] * times,
            next_positions=self.next_positions[row : row + 1] * times,
            order=None if self.order is None else self.order[row : row + 1].expand(times, -1),
        )

    def cropped(self, columns: int) -> Prompt:
        """The prompt without the last ``columns`` columns of the cache, and without token ids."""
        real = self.real()
        removed = real[:, self.columns - columns :].sum(1).tolist()
        real = real[:, : self.columns - columns]
        lengths = tuple(real.sum(1).tolist())
        contexts = tuple((min(a, n), min(b, n)) for (a, b), n in zip(self.contexts, lengths, strict=True))
        return replace(
            self,
            columns=self.columns - columns,
            lengths=lengths,
            contexts=contexts,
            next_positions=tuple(
                position - count for position, count in zip(self.next_positions, removed, strict=True)
            ),
            input_ids=None,
            order=left_padding_order(real),
        )


def read_prompt(
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    context: Context | None,
    shape: tuple[int, int],
) -> tuple[Prompt, Tensor]:
    """Find the distinct rows of a prompt. Rows are distinct if they differ in tokens, positions or context.

    Args:
        input_ids: `[B, P]`, or with more columns. None if tokens do not tell what a row holds (a prompt of embeddings,
            images beside the text); then every row is distinct.
        attention_mask: `[B, P]`, or with more columns, zero wherever a row has no token, on either side or in between.
            None without padding.
        position_ids: `[B, P]`, or with more columns. None if positions count columns.
        context: See `Context`. None for the whole of each row.
        shape: ``(B, P)``.

    Returns: the prompt, whose distinct rows come in order of first appearance, and the distinct row of each batch row
        `[B]`.

    Raises:
        InvalidInputError: A row has no tokens, or a context span lies outside its row.
    """
    batch, columns = shape
    order: Tensor | None = None
    if attention_mask is None:
        lengths = [columns] * batch
    else:
        real = attention_mask[:, :columns].bool().cpu()
        lengths = real.sum(1).tolist()
        for row, length in enumerate(lengths):
            if length == 0:
                raise InvalidInputError(
                    f"row {row} of the prompt has no tokens: its attention mask is all zero; leave the row out"
                )
        order = left_padding_order(real)
    if position_ids is None:
        position_ids = torch.arange(columns).expand(batch, -1)
    position_ids = position_ids[:, :columns].cpu()
    if input_ids is not None:
        input_ids = input_ids[:, :columns].cpu()
    if order is not None:
        position_ids = position_ids.gather(1, order)
        input_ids = None if input_ids is None else input_ids.gather(1, order)

    seen: dict[object, int] = {}
    first: list[int] = []
    rows = []
    for row, length in enumerate(lengths):
        key: object = row
        if input_ids is not None:
            own = slice(columns - length, columns)
            key = (
                tuple(input_ids[row, own].tolist()),
                tuple(position_ids[row, own].tolist()),
                context_of(context, row, batch),
                () if order is None else tuple(order[row, own].tolist()),
            )
        place = seen.setdefault(key, len(first))
        if place == len(first):
            first.append(row)
        rows.append(place)
    own_lengths = tuple(lengths[row] for row in first)
    prompt = Prompt(
        columns=columns,
        lengths=own_lengths,
        contexts=_contexts([context_of(context, row, batch) for row in first], own_lengths),
        next_positions=tuple(int(position_ids[row, -1]) + 1 for row in first),
        input_ids=None if input_ids is None else input_ids[first],
        order=None if order is None else order[first],
    )
    return prompt, torch.tensor(rows)


def left_padding_order(real: Tensor) -> Tensor | None:
    """The order of columns that moves the padding of each row to the left, and keeps the order of its tokens.

    Args:
        real: `[B, N]`, bool, which columns hold a token.

    Returns: the column numbers `[B, N]`, or None if all rows are left-padded already.
    """
    if not (real[:, :-1] & ~real[:, 1:]).any():
        return None
    return real.int().argsort(dim=1, stable=True)


def plain_context(context: Context | None) -> list[tuple[int, int]] | None:
    """The spans of a `Context` as Python ints: one for all rows, or one per row; None for the whole of each row.

    Raises:
        InvalidInputError: ``context`` is neither a span nor a sequence of spans.
    """
    if context is None:
        return None
    given: list[Any] = [context] if _is_span(context) else list(context) if isinstance(context, Sequence) else []
    if not given or not all(_is_span(span) for span in given):
        raise InvalidInputError(
            f"context: expected (start, stop) for all rows or one such span for each, whole numbers, got {context!r}"
        )
    return [(int(start), int(stop)) for start, stop in given]


def _is_span(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and all(isinstance(b, numbers.Integral) for b in value)


def context_of(context: Context | None, row: int, batch: int) -> tuple[int, int] | None:
    """The span that a `Context` holds for one row of a batch; None for the whole row.

    If there are fewer spans than rows, each span serves the same number of consecutive rows. ``generate`` expands its
    inputs in this way for beams and several return sequences.

    Raises:
        InvalidInputError: The number of rows is not a multiple of the number of spans.
    """
    spans = plain_context(context)
    if spans is None:
        return None
    if batch % len(spans):
        raise InvalidInputError(
            f"context: expected (start, stop) for all rows or one such span for each of {batch} rows, got {context!r}"
        )
    return spans[row // (batch // len(spans))]


def _contexts(spans: Sequence[tuple[int, int] | None], lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    contexts = []
    for span, length in zip(spans, lengths, strict=True):
        start, stop = (0, length) if span is None else span
        if not 0 <= start < stop <= length:
            raise InvalidInputError(
                f"context: expected 0 <= start < stop <= {length}, the prompt's own tokens without padding, "
                f"got ({start}, {stop})"
            )
        contexts.append((start, stop))
    return tuple(contexts)


def checked_ids(input_ids: Tensor, attention_mask: Tensor | None, move_padding: bool) -> tuple[Tensor, Tensor | None]:
    """A prompt's ids and mask `[B, N]`, if their shapes fit; a mask without padding becomes None.

    Args:
        input_ids: `[B, N]`.
        attention_mask: `[B, N]` or None.
        move_padding: Whether the padding of every row is moved to the left.

    Raises:
        InvalidInputError: A shape is wrong, or the prompt is empty.
    """
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.numel() == 0:
        got = [*input_ids.shape] if isinstance(input_ids, Tensor) else f"a {type(input_ids).__name__}"
        raise InvalidInputError(f"expected input_ids, a tensor [batch, tokens] with at least one token, got {got}")
    if attention_mask is None:
        return input_ids, None
    if attention_mask.shape != input_ids.shape:
        raise InvalidInputError(
            f"expected attention_mask {[*input_ids.shape]}, the shape of input_ids, got {[*attention_mask.shape]}"
        )
    mask = attention_mask.bool()
    if mask.all():
        return input_ids, None
    order = left_padding_order(mask) if move_padding else None
    return (input_ids, mask) if order is None else (input_ids.gather(1, order), mask.gather(1, order))
