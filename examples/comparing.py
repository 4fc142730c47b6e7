"""Ask questions about a document, with its full cache and with pruned caches, all made from one prefill."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hidden_facts import HiddenFacts
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proxykv_hf import ProxyPrunedCache, RetentionPolicy, Scorer
from proxykv_hf._compat import cache_keyword
from proxykv_hf.chat import chat_affixes, encode


@dataclass(frozen=True)
class Outcome:
    """The result of one method on one document.

    Args:
        method: The scorer's name, or ``full``.
        ratio: Share of the document's KV pairs kept.
        right: For each question, whether the answer contains the number.
        kv_bytes: Bytes of the cache that answered the questions.
        answer_seconds: Seconds for all answers, in one batch.
    """

    method: str
    ratio: float
    right: tuple[bool, ...]
    kv_bytes: int
    answer_seconds: float


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sample: HiddenFacts,
    scorers: Mapping[str, Scorer],
    ratios: Sequence[float],
) -> tuple[list[Outcome], dict[str, float]]:
    """Prefill once, prune with every scorer at every ratio, and ask every question each time.

    The document is the context; no scorer sees the questions. No token is protected.

    Returns: the outcomes, and the seconds of each phase of the prefill.
    """
    before, after = chat_affixes(tokenizer)
    prefix = encode(tokenizer, before)
    ids = prefix + encode(tokenizer, sample.text)
    turns = [encode(tokenizer, f"\n\n{question}{after}{start}") for question, start, _ in sample.questions]
    numbers = [number for *_, number in sample.questions]
    outcomes = []
    with ProxyPrunedCache(model, None, RetentionPolicy(1.0), tokenizer=tokenizer) as whole:
        scores = whole.prefill(
            torch.tensor([ids], device=model.device), context=(len(prefix), len(ids)), prune=False, scorers=scorers
        )

        def ask(cache: ProxyPrunedCache, method: str, ratio: float) -> None:
            started = time.perf_counter()
            answers = batched_answers(model, tokenizer, cache, ids, turns)
            outcomes.append(
                Outcome(
                    method,
                    ratio,
                    tuple(number in answer for number, answer in zip(numbers, answers, strict=True)),
                    cache.report().bytes_kept,
                    time.perf_counter() - started,
                )
            )

        ask(whole, "full", 1.0)
        for ratio in ratios:
            for name, values in scores.items():
                policy = RetentionPolicy(ratio, sink_tokens=0, recent_tokens=0)
                with whole.compress(values, policy) as pruned:
                    ask(pruned, name, ratio)
        seconds = whole.report().seconds
    return outcomes, seconds


@torch.no_grad()
def batched_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: ProxyPrunedCache,
    ids: list[int],
    turns: Sequence[list[int]],
    max_new_tokens: int = 10,
) -> list[str]:
    """Greedy answers, in one batch, to turns of different lengths after a document ``ids``, which ``cache`` holds."""
    width = max(map(len, turns))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    rows = [ids + [pad] * (width - len(turn)) + turn for turn in turns]
    masks = [[1] * len(ids) + [0] * (width - len(turn)) + [1] * len(turn) for turn in turns]
    inputs: Any = {
        "input_ids": torch.tensor(rows, device=model.device),
        "attention_mask": torch.tensor(masks, device=model.device),
    }
    with cache.fork(len(turns)) as fork:
        out = model.generate(  # type: ignore[operator]
            **inputs, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=pad, **{cache_keyword(model): fork}
        )
    return [str(tokenizer.decode(row[len(ids) + width :], skip_special_tokens=True)) for row in out]
