"""Variable tracking, RULER's vt (arXiv 2404.06654, section 3): a chain of assignments hidden in repeated noise."""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from ..task import Example, Question, Task
from .fitting import fit, if_short, seeded, strewn
from .niah import NOISE

HOPS = 4
INSTRUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
ANSWER = (
    "Answer: According to the chain(s) of variable assignment in the text above, "
    f"{HOPS + 1} variables are assigned the value {{value}}, they are:"
)
#: The number of repetitions of the noise in the solved example.
EXAMPLE_NOISE = 3


def chain(rng: random.Random, letters: int) -> tuple[str, list[str], list[str]]:
    """A value, the names of all variables that have it, and the assignments."""
    names: dict[str, None] = {}
    while len(names) <= HOPS:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    value, (first, *rest) = str(rng.randrange(10_000, 100_000)), list(names)
    lines = [f"VAR {first} = {value}"]
    for old, new in zip([first, *rest], rest, strict=False):
        lines.append(f"VAR {new} = VAR {old}")
    return value, list(names), lines


def make(tokens: int, length: Callable[[str], int], seed: int, index: int) -> Example:
    """`Task.make`: as in RULER, a solved example comes first, if there is room."""
    rng = seeded("vt", seed, index, "facts")
    value, names, lines = chain(rng, letters=3)
    text = "\n".join(strewn(rng, lines)([NOISE] * EXAMPLE_NOISE))
    question, answer = QUESTION.format(value=value), ANSWER.format(value=value)
    solved = if_short(f"{INSTRUCTION}{text}{question} {answer} {' '.join(names)}\n\n", tokens, length)
    value, names, lines = chain(rng, letters=5)
    mix = strewn(rng, lines)

    def build(count: int) -> str:
        return solved + INSTRUCTION + "\n".join(mix([NOISE] * count))

    context = build(fit("vt", tokens, length, build))
    asked = Question(QUESTION.format(value=value), tuple(names), ANSWER.format(value=value), 30)
    return Example("vt", f"{index:05d}", context, (asked,))


TASK = Task("vt", "string_match_all", make, "RULER vt, arXiv 2404.06654")
