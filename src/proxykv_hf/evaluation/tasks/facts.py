"""Facts with one value each, and the questions that ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..task import Question
from .words import Words


@dataclass(frozen=True)
class Fact:
    """A kind of fact about somebody or something.

    Args:
        kind: What the value is: a method of `Words`, or a number of four digits.
        sentence: Tells the fact; ``{name}`` is the person or thing, ``{value}`` the value.
        question: Asks for the value.
        answer_prefix: The beginning of the answer, unless the task sets it.
    """

    kind: Literal["person", "town", "thing", "number"]
    sentence: str
    question: str
    answer_prefix: str = ""

    def value(self, words: Words) -> str:
        """A new value from ``words``."""
        return words.number(4) if self.kind == "number" else str(getattr(words, self.kind)())

    def told(self, name: str, value: str) -> str:
        """The sentence that tells the fact."""
        return self.sentence.format(name=name, value=value)

    def asked(self, name: str, value: str) -> Question:
        """The question that asks for the value."""
        text, prefix = self.question.format(name=name), self.answer_prefix.format(name=name)
        return Question(f"\n\nQuestion: {text}", (value,), prefix, 16)
