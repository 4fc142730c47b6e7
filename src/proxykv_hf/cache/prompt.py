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
    """A left-padded prompt of R distinct rows and P columns. Copies of a row count once.

    Args:
        columns: P, the number of columns.
        lengths: `[R]`, the number of tokens of each row. The columns before them are padding.
        contexts: `[R]`, the span of each row that may be evicted.
        next_positions: `[R]`, the position id that follows each row.
        input_ids: `[R, P]`, or None if the prompt came as embeddings.
    """

    columns: int
    lengths: tuple[int, ...]
    contexts: tuple[tuple[int, int], ...]
    next_positions: tuple[int, ...]
    input_ids: Tensor | None

    @property
    def pads(self) -> tuple[int, ...]:
        """`[R]`, the number of padding columns of each row."""
        return tuple(self.columns - length for length in self.lengths)

    @property
    def padded(self) -> bool:
        """Whether any row has padding."""
        return any(self.pads)

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
        )

    def cropped(self, columns: int) -> Prompt:
        """The prompt without its last ``columns`` columns."""
        lengths = tuple(max(0, length - columns) for length in self.lengths)
        contexts = tuple((min(a, n), min(b, n)) for (a, b), n in zip(self.contexts, lengths, strict=True))
        return replace(
            self,
            columns=self.columns - columns,
            lengths=lengths,
            contexts=contexts,
            next_positions=tuple(position - columns for position in self.next_positions),
            input_ids=None if self.input_ids is None else self.input_ids[:, : self.columns - columns],
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
        attention_mask: `[B, P]`, or with more columns, left-padded. None without padding.
        position_ids: `[B, P]`, or with more columns. None if positions count columns.
        context: See `Context`. None for the whole of each row.
        shape: ``(B, P)``.

    Returns: the prompt, whose distinct rows come in order of first appearance, and the distinct row of each batch row
        `[B]`.

    Raises:
        InvalidInputError: A row has no tokens, padding is not on the left, or a context span lies outside its row.
    """
    batch, columns = shape
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
        check_left_padded(real)
    if position_ids is None:
        position_ids = torch.arange(columns).expand(batch, -1)
    position_ids = position_ids[:, :columns].cpu()

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
        input_ids=None if input_ids is None else input_ids[first, :columns].cpu(),
    )
    return prompt, torch.tensor(rows)


def check_left_padded(real: Tensor) -> None:
    """Refuse a mask `[B, N]` (bool) in which padding follows a token.

    Raises:
        InvalidInputError: It does in some row, which the error names.
    """
    for row in (real[:, :-1] & ~real[:, 1:]).any(1).nonzero()[:, 0].tolist():
        raise InvalidInputError(
            f"expected padding on the left, but row {row} of attention_mask has a zero after a one: set "
            "tokenizer.padding_side = 'left' (cache.prefill takes right padding too); if this is a padded follow-up "
            "turn after max_new_tokens=1, call report() before it"
        )


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


def left_pad(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Move the padding of every row to the left.

    Args:
        input_ids: `[B, N]`.
        attention_mask: `[B, N]` or None.

    Returns: the left-padded ids and mask `[B, N]`. A mask without padding becomes None.

    Raises:
        InvalidInputError: A shape is wrong, the prompt or a row is empty, or padding lies between tokens of a row.
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
    for row, real in enumerate(mask):
        places = real.nonzero()[:, 0]
        if len(places) == 0:
            raise InvalidInputError(
                f"row {row} of the prompt has no tokens: its attention mask is all zero; leave the row out"
            )
        if int(places[-1] - places[0]) + 1 != len(places):
            raise InvalidInputError(
                f"expected padding only before or after a row's tokens, but row {row} of attention_mask has a hole"
            )
    order = mask.int().argsort(dim=1, stable=True)  # padding comes first, and tokens keep their order
    return input_ids.gather(1, order), mask.gather(1, order)
