"""Needles in a haystack: RULER's eight configurations (arXiv 2404.06654, section 3)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ..task import Example, Question, Task
from .fitting import Pieces, fit, seeded, strewn
from .prose import sentences
from .words import Words

NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ONE_HIDDEN = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
SOME_HIDDEN = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind}s afterwards.\n"
)
#: The tokens of a value, with the separator that the model writes between two values.
VALUE_TOKENS = {"number": 12, "uuid": 40}
#: The largest number of questions about a haystack of needles.
MOST_QUESTIONS = 8


@dataclass(frozen=True)
class Needles:
    """One configuration.

    Args:
        haystack: Repeated noise, essays, or needles that no question asks for.
        value: The kind of the values.
        key: The kind of the keys.
        keys: The number of keys; a haystack of needles has as many as fit.
        values: The number of values of each key.
        together: Whether one question asks for all keys.
    """

    haystack: Literal["noise", "essay", "needles"]
    value: Literal["number", "uuid"] = "number"
    key: Literal["word", "uuid"] = "word"
    keys: int = 1
    values: int = 1
    together: bool = False


CONFIGURATIONS = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value="uuid"),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", value="uuid", key="uuid"),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", keys=4, together=True),
}


def maker(name: str) -> Callable[[int, Callable[[str], int], int, int], Example]:
    """The `Task.make` of one configuration."""
    form = CONFIGURATIONS[name]

    def make(tokens: int, length: Callable[[str], int], seed: int, index: int) -> Example:
        words = Words(seeded(name, seed, index, "facts"))
        rng = seeded(name, seed, index, "places")

        def pairs() -> Iterator[tuple[str, str]]:
            while True:
                key = words.key() if form.key == "word" else words.uuid()
                for _ in range(form.values):
                    yield key, words.number(7) if form.value == "number" else words.uuid()

        def needle(pair: tuple[str, str]) -> str:
            return NEEDLE.format(kind=form.value, key=pair[0], value=pair[1])

        head = (SOME_HIDDEN if form.together or form.values > 1 else ONE_HIDDEN).format(kind=form.value)
        if form.haystack == "needles":
            facts: list[tuple[str, str]] = []

            def build(count: int) -> str:
                facts.extend(itertools.islice(pairs(), max(0, count - len(facts))))
                return head + "\n".join(map(needle, facts[:count]))

            count = fit(name, tokens, length, build, least=1)
            hidden = rng.sample(facts[:count], min(MOST_QUESTIONS, count))
        else:
            hidden = list(itertools.islice(pairs(), form.keys * form.values))
            mix = strewn(rng, rng.sample(list(map(needle, hidden)), len(hidden)))
            noise = form.haystack == "noise"
            hay = Pieces(itertools.repeat(NOISE) if noise else sentences(seeded(name, seed, index, "essays")))

            def build(count: int) -> str:
                return head + ("\n" if noise else " ").join(mix(hay.first(count)))

            count = fit(name, tokens, length, build)
        return Example(name, f"{index:05d}", build(count), tuple(questions(form, hidden)))

    return make


def questions(form: Needles, hidden: list[tuple[str, str]]) -> Iterator[Question]:
    """One question for each key, or one for all keys. Wording and answer prefix are RULER's."""
    values: dict[str, list[str]] = {}
    for key, value in hidden:
        values.setdefault(key, []).append(value)
    groups = [list(values)] if form.together else [[key] for key in values]
    for keys in groups:
        references = tuple(value for key in keys for value in values[key])
        asked = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
        are, plural = ("is", "") if len(references) == 1 else ("are", "s")
        what = f"the special magic {form.value}{plural} for {asked} mentioned in the provided text"
        yield Question(
            f"\nWhat {are} {'all ' if plural else ''}{what}?",
            references,
            f"T{what[1:]} {are}",
            VALUE_TOKENS[form.value] * len(references) + 4,
        )


def tasks() -> Iterator[Task]:
    """All eight tasks. RULER asks for one of several keys; here each has a question (at most ``MOST_QUESTIONS``)."""
    for name in CONFIGURATIONS:
        yield Task(name, "string_match_all", maker(name), f"RULER {name}, arXiv 2404.06654")
