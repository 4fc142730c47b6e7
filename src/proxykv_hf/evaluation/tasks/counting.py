"""Counting words, RULER's cwe and fwe (arXiv 2404.06654, section 3): the whole context matters."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable

from ..task import Example, Question, Task
from .fitting import Pieces, fit, if_short, seeded
from .words import ADJECTIVES, NOUNS, Words

COMMON = 10
LIST = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
LIST_QUESTION = f"\nQuestion: What are the {COMMON} most common words in the above list?"
LIST_ANSWER = f"Answer: The top {COMMON} words that appear most often in the list are:"
CODED = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. "
)
CODED_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
CODED_ANSWER = "Answer: According to the coded text above, the three most frequently appeared words are:"
#: The exponent of the zeta distribution, and its normalization.
ALPHA, ZETA = 2, math.pi**2 / 6
LETTERS = 6


def repeats(tokens: int) -> tuple[int, int]:
    """How often each common word and each other word appears; from 1,024 tokens on as in RULER."""
    if tokens >= 4096:
        return 30, 3
    return (6, 1) if tokens >= 1024 else (3, 1)


def numbered(rng: random.Random, common: list[str], others: list[str], often: int, seldom: int) -> str:
    """A numbered list of the words in random order, ``1. word 2. word``."""
    words = common * often + others * seldom
    rng.shuffle(words)
    return LIST + " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def common_words(tokens: int, length: Callable[[str], int], seed: int, index: int) -> Example:
    """`Task.make` of cwe: ten words appear more often in a numbered list than the others.

    As in RULER, a solved list of 40 words comes first, if there is room.
    """
    rng = seeded("cwe", seed, index, "words")
    single = rng.sample([*ADJECTIVES, *NOUNS], len(ADJECTIVES) + len(NOUNS))
    shown, others = single[-COMMON:], single[-2 * COMMON : -COMMON]
    answer = " ".join(f"{number}. {word}" for number, word in enumerate(shown, 1))
    example = f"{numbered(rng, shown, others, 3, 1)}{LIST_QUESTION} {LIST_ANSWER} {answer}\n\n"
    solved = if_short(example, tokens, length)
    common, others = single[:COMMON], single[COMMON : -2 * COMMON]
    words = Words(rng)
    further = Pieces(iter(words.key, ""))

    def build(count: int) -> str:
        rare = [*others[:count], *further.first(max(0, count - len(others)))]
        return solved + numbered(seeded("cwe", seed, index, "order"), common, rare, *repeats(tokens))

    context = build(fit("cwe", tokens, length, build))
    asked = Question(LIST_QUESTION, tuple(common), LIST_ANSWER, 64)
    return Example("cwe", f"{index:05d}", context, (asked,))


def frequent_words(tokens: int, length: Callable[[str], int], seed: int, index: int) -> Example:
    """`Task.make` of fwe: the three most frequent made-up words; the k-th has a frequency proportional to ``k^-2``."""
    rng = seeded("fwe", seed, index, "words")
    coded: dict[str, None] = {}
    while len(coded) < max(4, tokens // 50):
        coded["".join(rng.choices(string.ascii_lowercase, k=LETTERS))] = None
    vocabulary = ["...", *coded]  # the most frequent one is noise

    def build(count: int) -> str:
        words = [
            word
            for rank, word in enumerate(vocabulary, 1)
            for _ in range(int(count / (rank**ALPHA * ZETA)))
        ]  # fmt: skip
        seeded("fwe", seed, index, "order").shuffle(words)
        return CODED + " ".join(words)

    # From a count of 53 on, the third coded word appears more often than the fourth.
    context = build(fit("fwe", tokens, length, build, least=53))
    asked = Question(CODED_QUESTION, tuple(vocabulary[1:4]), CODED_ANSWER, 32)
    return Example("fwe", f"{index:05d}", context, (asked,))


TASKS = (
    Task("cwe", "string_match_all", common_words, "RULER cwe, arXiv 2404.06654"),
    Task("fwe", "string_match_all", frequent_words, "RULER fwe, arXiv 2404.06654"),
)
