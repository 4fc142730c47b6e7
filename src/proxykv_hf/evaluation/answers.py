"""Greedy answers, and how likely the reference is, from many pruned copies of one prompt in one batch.

Decoding a token at a time is dear, and a cache that lost little answers as the full one does. So each question may
bring a draft, the full cache's own answer: one forward over question and draft shows how much of it this cache would
have said itself, and generation goes on only from the first token that differs. The draft changes the cost and not
the answer. Tokens that a row is not to see (a refused draft, padding) stay in the cache and are masked. In a
sliding-window layer they would take places in the window: a target with such layers is to be asked without drafts, one
question at a time.
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
        ids: What follows the prompt, up to where the answer begins; at least one.
        reference: The tokens whose likelihood is measured; none if there is no reference.
        max_new_tokens: The longest answer, at least 1.
        draft: A guess at the answer.
    """

    ids: tuple[int, ...]
    reference: tuple[int, ...]
    max_new_tokens: int
    draft: tuple[int, ...] = ()

    @property
    def usable_draft(self) -> tuple[int, ...]:
        """As much of the draft as an answer may have."""
        return self.draft[: self.max_new_tokens]

    @property
    def tokens(self) -> int:
        """What one forward over question and draft is given."""
        return len(self.ids) + max(0, len(self.usable_draft) - 1)


@dataclass(frozen=True)
class Answer:
    """What one copy of the prompt said to one question.

    Args:
        tokens: The answer, its end token included.
        nll: Mean negative log-likelihood of the reference, nats a token; None if there is no reference.
        tokens_nll: How many tokens that is the mean of.
        seconds: This answer's share of its batch's time.
    """

    tokens: tuple[int, ...]
    nll: float | None
    tokens_nll: int
    seconds: float


def end_tokens(target: PreTrainedModel) -> frozenset[int]:
    """What ends an answer, as ``generate`` has it."""
    given = None if target.generation_config is None else target.generation_config.eos_token_id
    return frozenset([given] if isinstance(given, int) else given or [])


def batches(
    turns: Sequence[Turn], ways: int, batch_tokens: int, one_by_one: bool = False
) -> Iterator[tuple[list[int], range]]:
    """Which turns go together, and for how many copies of the prompt, with at most ``batch_tokens`` in a forward.

    At least one turn and one copy go in any case. Turns of like length go together.

    Args:
        turns: All that are to be asked.
        ways: Copies of the prompt, each of which is asked all of them.
        batch_tokens: Tokens of a forward, padding included.
        one_by_one: No two turns go together, so that there is no padding.

    Yields: places among the turns, and a run of the ways.
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
    """Every turn asked of every row of a cache, which is left as it was.

    Args:
        target: The cache's.
        cache: B rows, one prompt kept in B ways, without padding.
        turns: At least one.

    Returns: `[B][len(turns)]`.
    """
    started = time.perf_counter()
    ways = len(cache.report().seen_tokens)
    asked = list(turns) * ways  # the rows of a fork: each way's copies together
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
    """Rows of a cache, what each of them sees, and where it goes on.

    Args:
        target: The cache's.
        cache: Prefilled, without padding; it grows.
        rows: B.
    """

    def __init__(self, target: PreTrainedModel, cache: ProxyPrunedCache, rows: int) -> None:
        self.target, self.cache = target, cache
        seen = cache.get_seq_length()
        device = device_of(target)
        self.mask = torch.ones(rows, seen, dtype=torch.bool, device=device)
        self.position = torch.full((rows, 1), seen, device=device)

    def feed(self, tokens: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> list[Tensor]:
        """One forward over each row's own tokens.

        Args:
            tokens: `[B]`, of unlike lengths, none empty.
            wanted: `[B]`, what the tokens may end on: logits come for the first of them and each later one.

        Returns: per row `[max(1, len(wanted)), V]`, what follows each of the last so many tokens.
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
        """Each row sees no more of its last ``counts`` tokens, of those that the last `feed` gave it."""
        columns = self.mask.shape[1]
        for row, count in enumerate(counts):
            self.mask[row, columns - count :] = False
            self.position[row] -= count

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows only."""
        chosen = torch.tensor(rows, device=self.mask.device)
        self.cache.batch_select_indices(chosen)
        self.mask, self.position = self.mask[chosen], self.position[chosen]

    def fork(self, rows: Sequence[int]) -> _Batch:
        """Some rows, independent of this batch."""
        twin = object.__new__(_Batch)
        twin.target, twin.cache, twin.mask, twin.position = self.target, self.cache.fork(), self.mask, self.position
        twin.select(rows)
        return twin


def _agreed(own: Sequence[int], draft: Sequence[int]) -> list[int]:
    """As much of an answer as a draft tells: where both agree, and the first token of its own."""
    agree = 0
    while agree < len(draft) and own[agree] == draft[agree]:
        agree += 1
    return list(own[: min(agree + 1, len(own))])


def _continue(batch: _Batch, answers: list[list[int]], turns: Sequence[Turn], ends: frozenset[int]) -> None:
    """Complete ``answers``; of each all but the last token was fed, and refused tokens of the draft after them."""

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
    """Each reference's mean negative log-likelihood.

    As far as a reference begins as the draft does, the draft's logits serve; its other tokens are fed in place of the
    draft's, to a fork of the batch.

    Args:
        batch: It was just fed the questions, and all but the last token of the drafts.
        logits: What followed.
        turns: Likewise.
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
    """`[n]`, float32: of n tokens, each by its own row of ``logits`` `[n or more, V]`."""
    rows = logits[: len(tokens)].float()
    places = torch.tensor(tokens, dtype=torch.long, device=logits.device)[:, None]
    return rows.gather(1, places)[:, 0] - rows.logsumexp(-1)
