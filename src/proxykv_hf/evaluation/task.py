"""What is asked: a context, questions of it, and how their answers are scored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """One question of a context.

    Args:
        text: What follows the context in the user's turn, which is ``context + text``: it begins with its own line
            breaks. No scorer sees it, unless the evaluation is query-aware.
        references: Right answers; the task's metric says whether one or all of them are wanted.
        answer_prefix: What the answer is made to begin with, after the chat template's start of an answer.
        max_new_tokens: The longest answer.
        choices: All class names or options that the metric chooses from; empty where it needs none.
    """

    text: str
    references: tuple[str, ...]
    answer_prefix: str = ""
    max_new_tokens: int = 32
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Example:
    """One context, prefilled and compressed once, and the questions that are asked of it.

    Args:
        task: Name of its task.
        name: Unique among the task's examples, ``00000`` and so on.
        context: What is compressed.
        questions: At least one.
    """

    task: str
    name: str
    context: str
    questions: tuple[Question, ...]

    @property
    def fingerprint(self) -> str:
        """16 hex digits, others for another context or other questions."""
        return hashlib.sha256(repr((self.context, self.questions)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Task:
    """A seeded source of examples of any length.

    Args:
        name: Its name on the command line.
        metric: Name of the metric, one of `metrics.METRICS`.
        make: ``make(tokens, length, seed, index)``, the example of this index. Its context has at most ``tokens``
            tokens as ``length(text)`` counts them, and nearly as many.
        source: Where the task comes from: paper section or arXiv id.
    """

    name: str
    metric: str
    make: Callable[[int, Callable[[str], int], int, int], Example]
    source: str
