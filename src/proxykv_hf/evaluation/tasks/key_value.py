"""Key-value retrieval: one JSON object of random pairs (arXiv 2307.03172, section 3; SCBench, arXiv 2412.10319)."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator

from ..task import Example, Question, Task
from .fitting import Pieces, fit, seeded
from .words import Words

QUESTIONS = 8
HEAD = "Here is a JSON object that maps article numbers to articles.\n\n"


def make(tokens: int, length: Callable[[str], int], seed: int, index: int) -> Example:
    """`Task.make`: as many pairs as fit; the questions ask for the values of ``QUESTIONS`` keys.

    The papers use UUIDs. Keys and values here are shorter, so that a short text holds several pairs.
    """
    rng = seeded("key_value", seed, index, "pairs")
    words = Words(rng)

    def pairs() -> Iterator[str]:
        seen: set[str] = set()
        while True:
            key = "".join(rng.choices(string.ascii_uppercase, k=3)) + f"-{rng.randrange(1000, 10_000)}"
            if key not in seen:
                seen.add(key)
                yield f'"{key}": "{words.thing()} {rng.randrange(10, 100)}"'

    lines = Pieces(pairs())

    def build(count: int) -> str:
        return HEAD + "{" + ",\n ".join(lines.first(count)) + "}"

    count = fit("key_value", tokens, length, build, least=1)
    asked = []
    for line in seeded("key_value", seed, index, "questions").sample(lines.first(count), min(QUESTIONS, count)):
        key, value = line.strip('"').split('": "')
        prefix = f'The value of "{key}" in the JSON object is "'
        asked.append(Question(f'\n\nWhich value does the key "{key}" have?', (value,), prefix, 14))
    return Example("key_value", f"{index:05d}", build(count), tuple(asked))


TASK = Task("key_value", "string_match_all", make, "arXiv 2307.03172, section 3; SCBench Retr.KV, arXiv 2412.10319")
