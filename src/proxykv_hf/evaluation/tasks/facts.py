"""Facts with one value each, and the question that asks for it."""

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
        sentence: Tells it; ``{name}`` is who or what, ``{value}`` the value.
        question: Asks for it.
        answer_prefix: How the answer begins, where the task does not say so itself.
    """

    kind: Literal["person", "town", "thing", "number"]
    sentence: str
    question: str
    answer_prefix: str = ""

    def value(self, words: Words) -> str:
        """One that ``words`` gives only once."""
        return words.number(4) if self.kind == "number" else str(getattr(words, self.kind)())

    def told(self, name: str, value: str) -> str:
        """The sentence."""
        return self.sentence.format(name=name, value=value)

    def asked(self, name: str, value: str) -> Question:
        """The question."""
        text, prefix = self.question.format(name=name), self.answer_prefix.format(name=name)
        return Question(f"\n\nQuestion: {text}", (value,), prefix, 16)
