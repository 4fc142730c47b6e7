"""Which tokens of one text are kept, in which layers and heads: masks, and the words that most heads keep."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache.cache import ProxyPrunedCache
from ..cache.retention import RetentionPolicy, select
from ..chat import chat_affixes, encode
from ..errors import InvalidInputError
from ..geometry import device_of, max_positions
from ..scorers.base import Scorer

#: A word's span of tokens and its text: ``(start, stop, text)``.
Word = tuple[int, int, str]


@dataclass(frozen=True)
class Kept:
    """What each scorer keeps of the same N tokens.

    Args:
        layers: The indices of the L_full full-attention layers.
        masks: By the scorer's name, `[L_full, H, N]`, bool; True where the KV pair is kept.
        words: The words of the text that have tokens, in order.
        marks: Spans of tokens to highlight, ``(start, stop)``.
    """

    layers: tuple[int, ...]
    masks: dict[str, Tensor]
    words: tuple[Word, ...]
    marks: tuple[tuple[int, int], ...]

    def heads_keeping(self, name: str) -> Tensor:
        """`[N]`: the share of all heads that keep each token."""
        return self.masks[name].float().mean((0, 1))

    def overlap(self, name: str, other: str) -> float:
        """The share of the KV pairs kept by ``name`` that ``other`` keeps too."""
        mask = self.masks[name]
        return float((mask & self.masks[other]).sum() / mask.sum())


@torch.no_grad()
def find_kept(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    scorers: Mapping[str, Scorer],
    policy: RetentionPolicy,
    *,
    tokens: int | None = None,
    marks: Sequence[str] = (),
) -> Kept:
    """Prefill a user's turn that begins with ``text``, score the text, and select the KV pairs to keep.

    Args:
        target: The model, in eval mode.
        tokenizer: The target's tokenizer, a fast one.
        text: The text that is scored and may be evicted.
        scorers: By name; all run over one prefill.
        policy: How much is kept.
        tokens: Use only this many tokens from the start of the text; None for all.
        marks: Passages of the text whose tokens are highlighted.

    Raises:
        InvalidInputError: The text is empty or too long for the target, the tokenizer is not a fast one, or a mark is
            not in the text or has no tokens.
    """
    if not tokenizer.is_fast:
        raise InvalidInputError(
            "expected a fast tokenizer, which tells where in the text its tokens are, got a slow one"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded.input_ids[:tokens], encoded.offset_mapping[:tokens]
    if not ids:
        raise InvalidInputError("expected a text, got none")
    text = text[: offsets[-1][1]]
    for mark in marks:
        if not mark or mark not in text:
            raise InvalidInputError(f"marks: expected passages of the text's {len(ids)} tokens, got {mark!r}")
    found = [span for mark in marks for span in _tokens_of_mark(offsets, text, mark)]
    prefix = encode(tokenizer, chat_affixes(tokenizer)[0])
    limit = max_positions(target.config)
    if limit is not None and len(prefix) + len(ids) > limit:
        raise InvalidInputError(
            f"the text takes {len(prefix) + len(ids)} tokens and the target has {limit} positions: show fewer tokens"
        )
    prompt = torch.tensor([prefix + ids], device=device_of(target))
    context = (len(prefix), prompt.shape[1])
    with ProxyPrunedCache(target, None, RetentionPolicy(1.0), tokenizer=tokenizer) as whole:
        scores = whole.prefill(prompt, context=context, prune=False, scorers=scorers)  # {name: [1, L, H, N]}
        layers = whole.geometry.full_layers
    masks = {
        name: select(values[0, list(layers)], policy, context).keep[:, :, context[0] :].cpu()
        for name, values in scores.items()
    }
    words = [(_tokens(offsets, match.span()), match[0]) for match in re.finditer(r"\S+", text)]
    return Kept(
        layers=tuple(layers),
        masks=masks,
        words=tuple((*span, word) for span, word in words if span is not None),
        marks=tuple(found),
    )


def _tokens_of_mark(offsets: Sequence[tuple[int, int]], text: str, mark: str) -> list[tuple[int, int]]:
    """The spans of tokens of all places where a mark is in the text."""
    spans = [_tokens(offsets, match.span()) for match in re.finditer(re.escape(mark), text)]
    found = [span for span in spans if span is not None]
    if not found:
        raise InvalidInputError(f"marks: expected passages that have tokens, got {mark!r}: the tokenizer drops it")
    return found


def _tokens(offsets: Sequence[tuple[int, int]], span: tuple[int, int]) -> tuple[int, int] | None:
    """The span of tokens ``(start, stop)`` that covers a span of characters; None if the tokenizer drops them all."""
    inside = [place for place, (start, stop) in enumerate(offsets) if start < span[1] and stop > span[0]]
    return (inside[0], inside[-1] + 1) if inside else None


def peaks(shares: Tensor, words: Sequence[Word], count: int, apart: int) -> list[tuple[int, str]]:
    """The words that most heads keep, as ``(token, word)``, in the text's order.

    Args:
        shares: `[N]`, from `Kept.heads_keeping`.
        words: From `Kept.words`.
        count: The largest number of words.
        apart: The smallest distance between two of the words, in tokens.
    """
    candidates = []
    for start, stop, text in words:
        if any(map(str.isalnum, text)):
            token = start + int(shares[start:stop].argmax())
            candidates.append((float(shares[token]), token, text.strip(".,;:!?()[]{}\"'`*_")))
    chosen: list[tuple[int, str]] = []
    for _, token, text in sorted(candidates, key=lambda candidate: (-candidate[0], candidate[1])):
        if len(chosen) < count and all(abs(token - other) >= apart for other, _ in chosen):
            chosen.append((token, text))
    return sorted(chosen)
