"""Tasks and their examples: a context, and questions about it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """One question about a context.

    Args:
        text: The text after the context in the user's turn, which is ``context + text``, so it begins with its own
            line breaks. No scorer sees it, unless the evaluation is query-aware.
        references: Right answers; the task's metric says whether one or all of them are wanted.
        answer_prefix: The beginning of the answer, which is given to the model after the chat template's start of an
            answer.
        max_new_tokens: The length of the longest answer.
        choices: All class names or options that the metric chooses from; empty if the metric needs none.
    """

    text: str
    references: tuple[str, ...]
    answer_prefix: str = ""
    max_new_tokens: int = 32
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Example:
    """One context, which is prefilled and compressed once, and the questions about it.

    Args:
        task: The name of its task.
        name: A name that is unique among the task's examples, ``00000`` and so on.
        context: The text that is compressed.
        questions: At least one question.
    """

    task: str
    name: str
    context: str
    questions: tuple[Question, ...]

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the context and the questions."""
        return hashlib.sha256(repr((self.context, self.questions)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Task:
    """A seeded source of examples of any length.

    Args:
        name: Its name on the command line.
        metric: The name of its metric in `metrics.METRICS`.
        make: ``make(tokens, length, seed, index)`` makes the example of this index. Its context has at most ``tokens``
            tokens, as ``length(text)`` counts them, and nearly as many.
        source: Where the task comes from: paper section or arXiv id.
    """

    name: str
    metric: str
    make: Callable[[int, Callable[[str], int], int, int], Example]
    source: str
