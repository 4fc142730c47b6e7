"""Builds texts of a wanted number of tokens from pieces, with few tokenizations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from ...errors import InvalidInputError

#: A text is full if it leaves no more than this share of the tokens free.
SLACK = 0.02
#: A solved example that takes more than this share of the tokens is left out.
EXAMPLE_SHARE = 0.4
#: The number of pieces that the first guess adds.
FIRST_STEP = 8


def seeded(task: str, seed: int, index: int, part: str) -> random.Random:
    """A random generator for one part of an example.

    Each part has its own, so that the parts are independent: a short text and a long text hide the same facts.
    """
    return random.Random(f"{task} {seed} {index} {part}")


class Pieces:
    """An endless stream of pieces of text, whose first pieces can be read any number of times."""

    def __init__(self, stream: Iterator[str]) -> None:
        self._stream = stream
        self._had: list[str] = []

    def first(self, count: int) -> list[str]:
        """The stream's first ``count`` pieces, as a new list."""
        while len(self._had) < count:
            self._had.append(next(self._stream))
        return self._had[:count]


def fit(
    task: str,
    tokens: int,
    length: Callable[[str], int],
    build: Callable[[int], str],
    *,
    least: int = 0,
    most: int | None = None,
) -> int:
    """The largest number of pieces whose text fits, or a number that leaves at most ``SLACK`` of the tokens free.

    Each guess follows from the cost of a piece so far; after a guess that is too large, the range is halved. So a text
    of 128k tokens is tokenized a few times, not once for each sentence.

    Args:
        task: The name of the task, for the error message.
        tokens: The largest number of tokens.
        length: Counts the tokens of a text.
        build: Makes the text with this many pieces; more pieces make a longer text.
        least, most: Bounds on the number of pieces.

    Raises:
        InvalidInputError: Even the least number of pieces does not fit.
    """
    low, used = least, length(build(least))
    if used > tokens:
        raise InvalidInputError(
            f"{task}: expected room for at least {used} tokens, got {tokens}: "
            "ask for more tokens or leave this task out"
        )
    first, high, guess = used, None if most is None else most + 1, least + FIRST_STEP
    aim = (1 - SLACK / 2) * tokens
    while (high is None or high - low > 1) and tokens - used > SLACK * tokens:
        guess = max(low + 1, guess if high is None else min(guess, high - 1))
        if (needed := length(build(guess))) <= tokens:
            low, used = guess, needed
            guess = low + round((aim - used) * (low - least) / max(1, used - first))
        else:
            high = guess
            guess = (low + high) // 2
    return low


def if_short(solved: str, tokens: int, length: Callable[[str], int]) -> str:
    """The solved example, or an empty string if there is no room for it."""
    return solved if length(solved) <= EXAMPLE_SHARE * tokens else ""


def strewn(rng: random.Random, pieces: Sequence[str]) -> Callable[[list[str]], list[str]]:
    """A function that puts ``pieces``, in order, at random depths of a list.

    The relative depths do not depend on the length of the list.
    """
    depths = sorted(rng.random() for _ in pieces)

    def mix(others: list[str]) -> list[str]:
        mixed, before = [], 0
        for depth, piece in zip(depths, pieces, strict=True):
            place = int(depth * (len(others) + 1))
            mixed += [*others[before:place], piece]
            before = place
        return [*mixed, *others[before:]]

    return mix


def shares(count: int, parts: int) -> list[int]:
    """``count`` divided into ``parts`` as evenly as possible; the remainder goes to the first parts."""
    return [count // parts + (part < count % parts) for part in range(parts)]


def shuffled_forever(rng: random.Random, items: Sequence[str]) -> Iterator[str]:
    """All items in random order, then all items again in another order, and so on."""
    while True:
        yield from rng.sample(items, len(items))
