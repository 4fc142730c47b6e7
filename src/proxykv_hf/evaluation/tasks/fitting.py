"""Texts of a wanted number of tokens, from pieces, at a handful of tokenizations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from ...errors import InvalidInputError

#: A text that leaves no more than this share of its tokens free is full.
SLACK = 0.02
#: A solved example that takes up more than this share is left out.
EXAMPLE_SHARE = 0.4
#: Pieces of the first guess.
FIRST_STEP = 8


def seeded(task: str, seed: int, index: int, part: str) -> random.Random:
    """One source of randomness for each part of an example.

    Parts do not hang on each other: the same facts are hidden in a short text and in a long one.
    """
    return random.Random(f"{task} {seed} {index} {part}")


class Pieces:
    """An endless stream of pieces of text of which any number of first ones can be had, again and again."""

    def __init__(self, stream: Iterator[str]) -> None:
        self._stream = stream
        self._had: list[str] = []

    def first(self, count: int) -> list[str]:
        """The stream's first ``count`` pieces, as a list of its own."""
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
    """The greatest number of pieces whose text fits, or one that leaves less than ``SLACK`` free.

    Guesses by what a piece has cost so far and falls back on halving, so that a text of 128k tokens is tokenized a
    few times, not once for every sentence.

    Args:
        task: For the error.
        tokens: How many tokens there may be.
        length: Counts a text's tokens.
        build: The text with so many pieces; it grows with their number.
        least, most: Bounds of the number.

    Raises:
        InvalidInputError: Not even the least number fits.
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
    """A solved example to come before the text, or nothing where there is no room for it."""
    return solved if length(solved) <= EXAMPLE_SHARE * tokens else ""


def strewn(rng: random.Random, pieces: Sequence[str]) -> Callable[[list[str]], list[str]]:
    """Puts ``pieces``, in order, at random depths of a list; the depths are the same whatever the list's length."""
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
    """``count`` spread over ``parts`` as evenly as can be, the first ones ahead."""
    return [count // parts + (part < count % parts) for part in range(parts)]


def shuffled_forever(rng: random.Random, items: Sequence[str]) -> Iterator[str]:
    """All items in random order, then all again in another, and so on."""
    while True:
        yield from rng.sample(items, len(items))
