"""Greedy answers and the likelihood of the references, for many pruned copies of one prompt in one batch.

Decoding one token at a time is expensive, and a cache that lost little gives the same answer as the full cache. So a
question may bring a draft: the answer of the full cache. One forward over question and draft shows how much of the
draft a pruned copy would have said itself, and generation continues from the first token that differs. A draft changes
the cost of an answer, never the answer. Tokens that a row must not see (refused draft tokens, padding) stay in the
cache and are masked. In a sliding-window layer they would take places in the window, so a target with such layers must
be asked without drafts and one question at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .._compat import call_forward
from ..cache.cache import ProxyPrunedCache
from ..geometry import device_of


@dataclass(frozen=True)
class Turn:
    """A question as tokens.

    Args:
        ids: The tokens between the prompt and the answer; at least one.
        reference: The tokens whose likelihood is measured; empty if there is no reference.
        max_new_tokens: The length of the longest answer, at least 1.
        draft: A guess at the answer.
    """

    ids: tuple[int, ...]
    reference: tuple[int, ...]
    max_new_tokens: int
    draft: tuple[int, ...] = ()

    @property
    def usable_draft(self) -> tuple[int, ...]:
        """The draft, cut to the length of the longest answer."""
        return self.draft[: self.max_new_tokens]

    @property
    def tokens(self) -> int:
        """The number of tokens in one forward over question and draft."""
        return len(self.ids) + max(0, len(self.usable_draft) - 1)


@dataclass(frozen=True)
class Answer:
    """The answer of one copy of the prompt to one question.

    Args:
        tokens: The answer's tokens, its end token included.
        nll: Mean negative log-likelihood of the reference, in nats per token; None if there is no reference.
        tokens_nll: The number of tokens in the reference.
        seconds: This answer's share of the time that its batch took.
    """

    tokens: tuple[int, ...]
    nll: float | None
    tokens_nll: int
    seconds: float


def end_tokens(target: PreTrainedModel) -> frozenset[int]:
    """The tokens that end an answer, from the generation config, as in ``generate``."""
    given = None if target.generation_config is None else target.generation_config.eos_token_id
    return frozenset([given] if isinstance(given, int) else given or [])


def batches(
    turns: Sequence[Turn], ways: int, batch_tokens: int, one_by_one: bool = False
) -> Iterator[tuple[list[int], range]]:
    """Split turns and copies of the prompt into batches whose forward has at most ``batch_tokens`` tokens.

    Turns of similar length share a batch. A batch has at least one turn and one copy, even if they exceed the limit.

    Args:
        turns: All turns to ask.
        ways: The number of copies of the prompt; every copy is asked every turn.
        batch_tokens: The limit on the tokens of one forward, padding included.
        one_by_one: Give each turn a batch of its own, so that there is no padding.

    Yields: Indices of the batch's turns, and the range of its copies.
    """
    order = sorted(range(len(turns)), key=lambda place: turns[place].tokens)
    while order:
        count = 1
        most = 1 if one_by_one else len(order)
        while count < most and (count + 1) * turns[order[count]].tokens <= batch_tokens:
            count += 1
        group, order = order[:count], order[count:]
        together = max(1, batch_tokens // (count * turns[group[-1]].tokens))
        for first in range(0, ways, together):
            yield group, range(first, min(first + together, ways))


@torch.no_grad()
def ask(target: PreTrainedModel, cache: ProxyPrunedCache, turns: Sequence[Turn]) -> list[list[Answer]]:
    """Put every turn to every row of a cache; the cache itself does not change.

    Args:
        target: The model that the cache belongs to.
        cache: B rows: one prompt, kept in B ways, without padding.
        turns: At least one turn.

    Returns: The answers, `[B][len(turns)]`.
    """
    started = time.perf_counter()
    ways = len(cache.report().seen_tokens)
    asked = list(turns) * ways  # the order of a fork's rows: all copies of one way, then of the next
    with cache.fork(len(turns)) as fork:
        batch = _Batch(target, fork, len(asked))
        drafts = [turn.usable_draft for turn in asked]
        logits = batch.feed([[*turn.ids, *draft[:-1]] for turn, draft in zip(asked, drafts, strict=True)], drafts)
        own = [row.argmax(-1).tolist() for row in logits]
        answers = [_agreed(tokens, draft) for tokens, draft in zip(own, drafts, strict=True)]
        likelihoods = _likelihoods(batch, logits, asked)
        del logits
        _continue(batch, answers, asked, end_tokens(target))
    share = (time.perf_counter() - started) / len(asked)
    found = [
        Answer(tuple(tokens), nll, len(turn.reference), share)
        for tokens, nll, turn in zip(answers, likelihoods, asked, strict=True)
    ]
    return [found[first : first + len(turns)] for first in range(0, len(found), len(turns))]


class _Batch:
    """The rows of a cache, with the attention mask and the next position of each row.

    Args:
        target: The model that the cache belongs to.
        cache: Prefilled, without padding; every `feed` appends to it.
        rows: The number of rows, B.
    """

    def __init__(self, target: PreTrainedModel, cache: ProxyPrunedCache, rows: int) -> None:
        self.target, self.cache = target, cache
        seen = cache.get_seq_length()
        device = device_of(target)
        self.mask = torch.ones(rows, seen, dtype=torch.bool, device=device)
        self.position = torch.full((rows, 1), seen, device=device)

    def feed(self, tokens: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> list[Tensor]:
        """Run one forward over each row's own tokens.

        Args:
            tokens: `[B]`, one sequence for each row; lengths may differ, none is empty.
            wanted: `[B]`, the tokens to predict in each row: the row's ``tokens`` end with all of them but the last.

        Returns: For each row `[max(1, len(wanted)), V]`, the logits of each wanted token, or of the next token if none
            is wanted.
        """
        width, last = max(map(len, tokens)), [max(1, len(row)) for row in wanted]
        ids = torch.tensor([[0] * (width - len(row)) + [*row] for row in tokens], device=device_of(self.target))
        real = torch.tensor(
            [[0] * (width - len(row)) + [1] * len(row) for row in tokens], device=device_of(self.target)
        )
        positions = (self.position + real.cumsum(1) - 1).clamp(min=0)
        self.mask = torch.cat([self.mask, real.bool()], dim=1)
        self.position = self.position + real.sum(1, keepdim=True)
        logits = call_forward(
            self.target,
            cache=self.cache,
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=max(last),
        ).logits
        return [row[-count:] for row, count in zip(logits, last, strict=True)]

    def forget(self, counts: Sequence[int]) -> None:
        """Hide the last ``counts`` tokens of each row from it; they must be from the last `feed`."""
        columns = self.mask.shape[1]
        for row, count in enumerate(counts):
            self.mask[row, columns - count :] = False
            self.position[row] -= count

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        chosen = torch.tensor(rows, device=self.mask.device)
        self.cache.batch_select_indices(chosen)
        self.mask, self.position = self.mask[chosen], self.position[chosen]

    def fork(self, rows: Sequence[int]) -> _Batch:
        """A copy of these rows that is independent of this batch."""
        twin = object.__new__(_Batch)
        twin.target, twin.cache, twin.mask, twin.position = self.target, self.cache.fork(), self.mask, self.position
        twin.select(rows)
        return twin


def _agreed(own: Sequence[int], draft: Sequence[int]) -> list[int]:
    """The start of an answer: the tokens that agree with the draft, and the first token that differs."""
    agree = 0
    while agree < len(draft) and own[agree] == draft[agree]:
        agree += 1
    return list(own[: min(agree + 1, len(own))])


def _continue(batch: _Batch, answers: list[list[int]], turns: Sequence[Turn], ends: frozenset[int]) -> None:
    """Complete ``answers`` in place.

    The batch was fed all tokens of each answer but the last, and after them the refused tokens of the draft.
    """

    def is_over(place: int) -> bool:
        return answers[place][-1] in ends or len(answers[place]) == turns[place].max_new_tokens

    batch.forget([max(1, len(turn.usable_draft)) - len(answer) for turn, answer in zip(turns, answers, strict=True)])
    rows = list(range(len(answers)))
    while True:
        going = [place for place, row in enumerate(rows) if not is_over(row)]
        if not going:
            return
        if len(going) < len(rows):
            batch.select(going)
            rows = [rows[place] for place in going]
        logits = batch.feed([answers[row][-1:] for row in rows], [()] * len(rows))
        for row, last in zip(rows, logits, strict=True):
            answers[row].append(int(last[-1].argmax()))


def _likelihoods(batch: _Batch, logits: Sequence[Tensor], turns: Sequence[Turn]) -> list[float | None]:
    """The mean negative log-likelihood of each reference.

    Where a reference begins like the draft, the draft's logits are used. The other tokens of the reference are fed to
    a fork of the batch, in place of the draft's.

    Args:
        batch: The batch, just after it was fed the questions and all tokens of the drafts but the last.
        logits: The logits of that forward, row by row.
        turns: The turn of each row.
    """
    found: list[list[Tensor]] = []
    shared: list[int] = []
    for turn, drafted in zip(turns, logits, strict=True):
        same = 0
        while same < min(len(turn.reference), len(drafted) - 1) and turn.reference[same] == turn.draft[same]:
            same += 1
        shared.append(same)
        found.append([_log_likelihoods(drafted, turn.reference[: same + 1])])
    rows = [row for row, turn in enumerate(turns) if len(turn.reference) > shared[row] + 1]
    if rows:
        rest = [turns[row].reference[shared[row] :] for row in rows]
        fork = batch.fork(rows)
        with fork.cache:
            fork.forget([len(logits[row]) - 1 - shared[row] for row in rows])
            after = fork.feed([tokens[:-1] for tokens in rest], [tokens[1:] for tokens in rest])
        for row, tokens, following in zip(rows, rest, after, strict=True):
            found[row].append(_log_likelihoods(following, tokens[1:]))
    return [
        -float(torch.cat(parts).mean()) if turn.reference else None for turn, parts in zip(turns, found, strict=True)
    ]


def _log_likelihoods(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """`[n]`, float32: the log-likelihood of n tokens, each by its own row of ``logits`` `[n or more, V]`."""
    rows = logits[: len(tokens)].float()
    places = torch.tensor(tokens, dtype=torch.long, device=logits.device)[:, None]
    return rows.gather(1, places)[:, 0] - rows.logsumexp(-1)
