"""The metrics of RULER (arXiv 2404.06654) and LongBench (arXiv 2308.14508).

``METRICS[name](answer, question)`` is a score in [0, 1]. With several references the best one counts, except for
`string_match_all`, which looks for all of them. ROUGE needs the extra ``eval``; `check_metric` tests for it before any
other work.
"""

from __future__ import annotations

import difflib
import importlib
import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..errors import InvalidInputError
from .task import Question

Metric = Callable[[str, Question], float]
#: The package that a metric needs; the extra ``eval`` has them all.
PACKAGES = {"rouge_l": "rouge", "rouge_l_first_line": "rouge"}


def check_metric(name: str) -> None:
    """Check that a metric exists and that the package it needs is installed.

    Raises:
        InvalidInputError: There is no metric of this name, or its package is not installed.
    """
    if name not in METRICS:
        raise InvalidInputError(f"metric: expected one of {', '.join(sorted(METRICS))}, got {name!r}")
    if name in PACKAGES:
        _package(PACKAGES[name])


def string_match_all(answer: str, question: Question) -> float:
    """The share of references that are in the answer, regardless of case (RULER)."""
    return sum(reference.lower() in answer.lower() for reference in question.references) / len(question.references)


def string_match_part(answer: str, question: Question) -> float:
    """Whether any of the references is in the answer, regardless of case (RULER, for its QA tasks)."""
    return float(any(reference.lower() in answer.lower() for reference in question.references))


def exact_match(answer: str, question: Question) -> float:
    """Whether the `normalized` answer equals a `normalized` reference (SQuAD, arXiv 1606.05250)."""
    return float(any(normalized(answer) == normalized(reference) for reference in question.references))


def f1(answer: str, question: Question) -> float:
    """The harmonic mean of precision and recall of the words, with both texts `normalized` (LongBench, QA)."""

    def one(reference: str) -> float:
        mine, theirs = normalized(answer).split(), normalized(reference).split()
        common = sum((Counter(mine) & Counter(theirs)).values())
        return 2 * common / (len(mine) + len(theirs)) if common else 0.0

    return max(map(one, question.references))


def normalized(text: str) -> str:
    """The text in lower case, without ASCII punctuation, articles and superfluous white space."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def rouge_l(answer: str, question: Question) -> float:
    """The F-measure of ROUGE-L (aclanthology.org/W04-1013), by the package ``rouge`` (LongBench, summaries).

    As in LongBench, the score is 0 if the package fails, such as on an empty answer or a sentence of a thousand words.
    """
    rouge = _package("rouge").Rouge(metrics=["rouge-l"])

    def one(reference: str) -> float:
        try:
            return float(rouge.get_scores(answer, reference)[0]["rouge-l"]["f"])
        except (ValueError, RecursionError):
            return 0.0

    return max(map(one, question.references))


def classification(answer: str, question: Question) -> float:
    """One over the number of classes named in the answer's first line; 0 if the right class is not named (LongBench).

    ``question.choices`` are the classes. A class whose name is a part of the right class's name does not count.
    """

    def one(reference: str) -> float:
        named = [
            choice
            for choice in question.choices
            if choice in first_line(answer) and (choice == reference or choice not in reference)
        ]
        return 1 / len(named) if reference in named else 0.0

    return max(map(one, question.references))


def count(answer: str, question: Question) -> float:
    """The share of the numbers in the answer that equal the reference (LongBench, passage_count)."""
    numbers = re.findall(r"\d+", answer)
    return max(numbers.count(reference) / max(1, len(numbers)) for reference in question.references)


def retrieval(answer: str, question: Question) -> float:
    """`count` for references such as "Paragraph 3" (LongBench, passage_retrieval_en)."""
    wanted = tuple((re.findall(r"\d+", reference) or [reference])[0] for reference in question.references)
    return count(answer, Question(question.text, wanted))


def edit_similarity(answer: str, question: Question) -> float:
    """``2 M / T`` for the answer's first line of code, rounded to hundredths (LongBench, code completion).

    M is the number of characters in matching blocks, and T that in both texts. `difflib.SequenceMatcher` counts them.
    LongBench's ``fuzzywuzzy`` uses it too, unless python-Levenshtein is installed, whose ratio is higher. A line with a
    backquote, ``#`` or ``//`` is not a line of code.
    """
    lines = answer.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    matchers = (difflib.SequenceMatcher(None, code, reference) for reference in question.references)
    return max(round(100 * matcher.ratio()) / 100 for matcher in matchers)


def first_line(answer: str) -> str:
    """The first line of the answer. A base model writes further examples after it."""
    return answer.lstrip("\n").split("\n")[0]


def of_first_line(metric: Metric) -> Metric:
    """A metric of the answer's first line only (LongBench, few-shot tasks)."""
    return lambda answer, question: metric(first_line(answer), question)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise InvalidInputError(f"expected {package} to be installed: pip install 'proxykv-hf[eval]'") from error


METRICS: dict[str, Metric] = {
    "classification": classification,
    "count": count,
    "edit_similarity": edit_similarity,
    "exact_match": exact_match,
    "f1": f1,
    "f1_first_line": of_first_line(f1),
    "retrieval": retrieval,
    "rouge_l": rouge_l,
    "rouge_l_first_line": of_first_line(rouge_l),
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
}
