"""Seeded documents that hide facts, and questions about them: small, offline, query-agnostic.

A document is filler prose, made from word lists, with sentences of the form "The special magic
number for amber-falcon is 4813027." strewn in; a question asks for one of the numbers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

_ADJECTIVES = """
amber brisk calm dusty eager faint gentle hollow ivory jolly keen lively
mellow narrow olive pale quiet rusty silver tidy urban vivid warm young
""".split()
_NOUNS = """
anchor basket candle desert engine falcon garden harbor island jacket kettle lantern
meadow needle orchard pepper quarry ribbon saddle timber umbrella valley window yarrow
""".split()
_PEOPLE = ["The baker", "A surveyor", "My neighbour", "The old captain", "Our teacher", "A young clerk", "The gardener"]
_VERBS = ["carried", "painted", "forgot", "repaired", "admired", "sold", "described", "hid", "borrowed", "measured"]
_PLACES = ["near the bridge", "behind the mill", "at the market", "by the river", "in the attic", "on the long road"]
_TIMES = ["before noon", "last winter", "every second day", "in the rain", "without a word", "after the feast"]


@dataclass(frozen=True)
class HiddenFacts:
    """A document and what it hides.

    Args:
        text: The document.
        questions: What to ask, how the answer starts (as in RULER, arXiv 2404.06654: a small model
            rambles without it), and the number that it must hold.
    """

    text: str
    questions: tuple[tuple[str, str, str], ...]


def hidden_facts(tokenizer: PreTrainedTokenizerBase, tokens: int, facts: int, seed: int) -> HiddenFacts:
    """A document of about ``tokens`` tokens with ``facts`` facts, evenly spread over its sentences."""
    rng = random.Random(seed)
    keys = rng.sample([f"{adjective}-{noun}" for adjective in _ADJECTIVES for noun in _NOUNS], facts)
    numbers = [str(rng.randrange(1_000_000, 10_000_000)) for _ in keys]
    hidden = [f"The special magic number for {key} is {number}." for key, number in zip(keys, numbers, strict=True)]
    filler: list[str] = []
    while len(tokenizer(" ".join(hidden + filler), add_special_tokens=False).input_ids) < tokens:
        filler.append(
            f"{rng.choice(_PEOPLE)} {rng.choice(_VERBS)} the {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)} "
            f"{rng.choice(_PLACES)} {rng.choice(_TIMES)}."
        )
    places = sorted(rng.sample(range(len(filler)), facts))
    for place, sentence in reversed(list(zip(places, hidden, strict=True))):
        filler.insert(place, sentence)
    return HiddenFacts(
        " ".join(filler),
        tuple(
            (
                f"What is the special magic number for {key}? Answer with the number only.",
                f"The special magic number for {key} is:",
                number,
            )
            for key, number in zip(keys, numbers, strict=True)
        ),
    )
