"""Rows of a prompt: which are copies of each other, how long each is, what of each may be evicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .errors import InvalidInputError

#: One span for all rows, or one a row; positions are the row's own, without padding.
Context = tuple[int, int] | Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Prompt:
    """A left-padded prompt, copies of a row counted once: R distinct rows of P columns.

    Args:
        columns: P.
        lengths: `[R]`, each row's own tokens; the columns before them are padding.
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
        """`[R]`, padding columns of each row."""
        return tuple(self.columns - length for length in self.lengths)

    @property
    def padded(self) -> bool:
        """Whether any row has padding."""
        return any(self.pads)

    def row_ids(self, row: int) -> Tensor:
        """`[n]`: a distinct row's own tokens."""
        if self.input_ids is None:
            raise InvalidInputError(
                "this scorer needs the prompt's input_ids, and the prompt came as inputs_embeds: pass "
                "input_ids, or use a scorer that reads the target's attention (SnapKVScorer)"
            )
        return self.input_ids[row, self.pads[row] :]

    def without_ids(self) -> Prompt:
        """The same without the tokens, to be kept for long."""
        return replace(self, input_ids=None)

    def cropped(self, columns: int) -> Prompt:
        """Without the last ``columns`` columns."""
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
    next_positions: Tensor | None,
    context: Context | None,
    shape: tuple[int, int],
) -> tuple[Prompt, Tensor]:
    """Find the distinct rows of a prompt.

    Args:
        input_ids: `[B, P]`, or None for a prompt given as embeddings.
        attention_mask: `[B, P]`, left-padded, or None without padding.
        next_positions: `[B]`, or None if positions count columns.
        context: See `Context`; None for all of each row.
        shape: ``(B, P)``.

    Returns: the prompt, and `[B]`: each row's place among the distinct ones, which come in the
        order in which they first appear.

    Raises:
        InvalidInputError: A row without tokens, padding that is not on the left, a context span
            outside a row.
    """
    batch, columns = shape
    if attention_mask is None:
        lengths = [columns] * batch
    else:
        real = attention_mask[:, :columns].bool().cpu()
        lengths = real.sum(1).tolist()
        for row, length in enumerate(lengths):
            if length == 0:
                raise InvalidInputError(f"row {row} of the prompt has no tokens: its attention mask is all zero")
            if not real[row, columns - length :].all():
                raise InvalidInputError(
                    f"expected padding on the left, but row {row} of attention_mask has a zero after a one: "
                    "set tokenizer.padding_side = 'left' (cache.prefill takes right padding too)"
                )
    if next_positions is None:
        next_positions = torch.full((batch,), columns)

    seen: dict[object, int] = {}
    first: list[int] = []
    rows = []
    for row, length in enumerate(lengths):
        ids = row if input_ids is None else tuple(input_ids[row, columns - length : columns].tolist())
        key = (ids, context_of(context, row, batch), int(next_positions[row]))
        place = seen.setdefault(key, len(first))
        if place == len(first):
            first.append(row)
        rows.append(place)
    own_lengths = tuple(lengths[row] for row in first)
    prompt = Prompt(
        columns=columns,
        lengths=own_lengths,
        contexts=_contexts([context_of(context, row, batch) for row in first], own_lengths),
        next_positions=tuple(int(next_positions[row]) for row in first),
        input_ids=None if input_ids is None else input_ids[first, :columns].cpu(),
    )
    return prompt, torch.tensor(rows)


def context_of(context: Context | None, row: int, batch: int) -> tuple[int, int] | None:
    """The span that a `Context` holds for one row of a batch."""
    if context is None:
        return None
    spans = list(context)
    if len(spans) == 2 and all(isinstance(bound, int) for bound in spans):
        return (int(spans[0]), int(spans[1]))  # type: ignore[call-overload]
    if len(spans) != batch:
        raise InvalidInputError(
            f"context: expected (start, stop) for all rows or one such span for each of {batch} rows, got {context!r}"
        )
    return (int(spans[row][0]), int(spans[row][1]))  # type: ignore[index]


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
    """Move every row's padding to the left; a mask without padding becomes None.

    Args:
        input_ids: `[B, N]`.
        attention_mask: `[B, N]` or None.

    Raises:
        InvalidInputError: A wrong shape, an empty prompt or row, a hole inside a row.
    """
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise InvalidInputError(f"expected input_ids [batch, tokens] with at least one token, got {[*input_ids.shape]}")
    if attention_mask is None:
        return input_ids, None
    if attention_mask.shape != input_ids.shape:
        raise InvalidInputError(
            f"expected attention_mask {[*input_ids.shape]} as input_ids, got {[*attention_mask.shape]}"
        )
    mask = attention_mask.bool()
    if mask.all():
        return input_ids, None
    for row, real in enumerate(mask):
        places = real.nonzero()[:, 0]
        if len(places) == 0:
            raise InvalidInputError(f"row {row} of the prompt has no tokens: its attention mask is all zero")
        if int(places[-1] - places[0]) + 1 != len(places):
            raise InvalidInputError(f"expected padding at the ends, but row {row} of attention_mask has a hole")
    order = mask.int().argsort(dim=1, stable=True)  # padding first, tokens after it in their order
    return input_ids.gather(1, order), mask.gather(1, order)
