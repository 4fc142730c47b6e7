"""Documents with hidden facts, and questions about them. They are generated from a seed, without a download.

A document is filler prose, made from word lists, in which sentences of the form "The special magic number for
amber-falcon is 4813027." are inserted. A question asks for one of the numbers.
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
    """A document and questions about the facts in it.

    Args:
        text: The document.
        questions: For each fact the question, the start of the answer (as in RULER, arXiv 2404.06654: a small model
            rambles without it), and the number that the answer must contain.
    """

    text: str
    questions: tuple[tuple[str, str, str], ...]


def hidden_facts(tokenizer: PreTrainedTokenizerBase, tokens: int, facts: int, seed: int) -> HiddenFacts:
    """A document of about ``tokens`` tokens, with ``facts`` facts between random sentences of it."""
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
