"""Find the function that a description fits, after RepoQA (arXiv 2406.06025) and SCBench's Code.RepoQA."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..task import Example, Question, Task
from .fitting import Pieces, fit, seeded
from .words import Words

QUESTIONS = 8
HEAD = "Here is a Python module.\n\n```python\n"
TAIL = "\n```"
#: Which values a function chooses from its argument, how it changes them, what it returns: in code and in words.
CHOICES = (
    ("value > {a}", "the numbers above {a}"),
    ("value < {a}", "the numbers below {a}"),
    ("value % {a} == 0", "the multiples of {a}"),
    ("value % {a} != 0", "the numbers that {a} does not divide"),
    ("abs(value) >= {a}", "the numbers whose magnitude is at least {a}"),
    ("value != {a}", "all numbers other than {a}"),
)
CHANGES = (
    ("value * {b}", "multiplies each by {b}"),
    ("value + {b}", "adds {b} to each"),
    ("value - {b}", "subtracts {b} from each"),
    ("value ** 2 - {b}", "squares each and takes {b} off"),
    ("value // {b}", "divides each by {b} without remainder"),
    ("min(value, {b})", "caps each at {b}"),
    ("{b} - value", "takes each away from {b}"),
)
RESULTS = (
    ("sum({x})", "their total"),
    ("max({x}, default=0)", "the largest of them"),
    ("min({x}, default=0)", "the smallest of them"),
    ("sorted({x})", "them in ascending order"),
    ("sorted({x}, reverse=True)", "them in descending order"),
    ("len(set({x}))", "how many different ones there are"),
)


def make(tokens: int, length: Callable[[str], int], seed: int, index: int) -> Example:
    """`Task.make`: as many functions as fit, with meaningless names; the questions describe ``QUESTIONS`` of them."""
    rng = seeded("function", seed, index, "functions")
    words = Words(rng)
    described: dict[str, str] = {}

    def functions() -> Iterator[str]:
        while True:
            choice, change, result = rng.choice(CHOICES), rng.choice(CHANGES), rng.choice(RESULTS)
            a, b = rng.randrange(3, 1000), rng.randrange(2, 1000)
            name = words.key().replace("-", "_")
            chosen, changed = choice[0].format(a=a), change[0].format(b=b)
            described[name] = f"It keeps {choice[1].format(a=a)}, {change[1].format(b=b)} and returns {result[1]}."
            yield (
                f"def {name}(values):\n"
                f"    chosen = [value for value in values if {chosen}]\n"
                f"    changed = [{changed} for value in chosen]\n"
                f"    return {result[0].format(x='changed')}"
            )

    pieces = Pieces(functions())

    def build(count: int) -> str:
        return HEAD + "\n\n\n".join(pieces.first(count)) + TAIL

    count = fit("function", tokens, length, build, least=1)
    names = [text[len("def ") : text.index("(")] for text in pieces.first(count)]
    asked = tuple(
        Question(
            f"\n\nWhich function of the module does the following?\n\n{described[name]}",
            (name,),
            "The function is `",
            12,
        )
        for name in seeded("function", seed, index, "questions").sample(names, min(QUESTIONS, count))
    )
    return Example("function", f"{index:05d}", build(count), asked)


TASK = Task("function", "string_match_all", make, "after RepoQA, arXiv 2406.06025, and SCBench, arXiv 2412.10319")
