"""How an answer is scored, in [0, 1]: RULER's (arXiv 2404.06654) and LongBench's metrics (arXiv 2308.14508).

``METRICS[name](answer, question)``; with several references the best one counts, but for `string_match_all`, which
wants them all. ROUGE needs the extra ``eval``; `check_metric` says so before any work.
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
#: Packages that a metric needs, all of them in the extra ``eval``.
PACKAGES = {"rouge_l": "rouge", "rouge_l_first_line": "rouge"}


def check_metric(name: str) -> None:
    """Whether there is such a metric, and what it needs.

    Raises:
        InvalidInputError: There is none of this name, or its package is not installed.
    """
    if name not in METRICS:
        raise InvalidInputError(f"metric: expected one of {', '.join(sorted(METRICS))}, got {name!r}")
    if name in PACKAGES:
        _package(PACKAGES[name])


def string_match_all(answer: str, question: Question) -> float:
    """The share of references that the answer holds, upper and lower case alike (RULER)."""
    return sum(reference.lower() in answer.lower() for reference in question.references) / len(question.references)


def string_match_part(answer: str, question: Question) -> float:
    """Whether the answer holds any of the references, upper and lower case alike (RULER, for its QA tasks)."""
    return float(any(reference.lower() in answer.lower() for reference in question.references))


def exact_match(answer: str, question: Question) -> float:
    """Whether the answer is one of the references, both as `normalized` (SQuAD's, arXiv 1606.05250)."""
    return float(any(normalized(answer) == normalized(reference) for reference in question.references))


def f1(answer: str, question: Question) -> float:
    """The harmonic mean of precision and recall of the answer's words, both as `normalized` (LongBench, QA)."""

    def one(reference: str) -> float:
        mine, theirs = normalized(answer).split(), normalized(reference).split()
        common = sum((Counter(mine) & Counter(theirs)).values())
        return 2 * common / (len(mine) + len(theirs)) if common else 0.0

    return max(map(one, question.references))


def normalized(text: str) -> str:
    """In lower case, without ASCII punctuation, articles and superfluous white space."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def rouge_l(answer: str, question: Question) -> float:
    """The F-measure of ROUGE-L (aclanthology.org/W04-1013), by the package ``rouge`` (LongBench, summaries).

    What the package cannot score, such as an empty answer or a sentence of a thousand words, counts 0, as there.
    """
    rouge = _package("rouge").Rouge(metrics=["rouge-l"])

    def one(reference: str) -> float:
        try:
            return float(rouge.get_scores(answer, reference)[0]["rouge-l"]["f"])
        except (ValueError, RecursionError):
            return 0.0

    return max(map(one, question.references))


def classification(answer: str, question: Question) -> float:
    """One over the number of classes named in the answer's first line, if the right one is among them (LongBench).

    A class whose name is a part of the right one's does not count as named. ``question.choices`` are the classes.
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
    """Of the numbers in the answer, the share that is the reference (LongBench, passage_count)."""
    numbers = re.findall(r"\d+", answer)
    return max(numbers.count(reference) / max(1, len(numbers)) for reference in question.references)


def retrieval(answer: str, question: Question) -> float:
    """`count` for references such as "Paragraph 3" (LongBench, passage_retrieval_en)."""
    wanted = tuple((re.findall(r"\d+", reference) or [reference])[0] for reference in question.references)
    return count(answer, Question(question.text, wanted))


def edit_similarity(answer: str, question: Question) -> float:
    """``2 M / T`` of the answer's first line of code, in whole hundredths (LongBench, code completion).

    M are the characters in matching blocks, T those of both texts: `difflib.SequenceMatcher`, which LongBench's
    ``fuzzywuzzy`` uses unless python-Levenshtein is installed, whose ratio is higher. A line with a backquote, ``#`` or
    ``//`` is none of code.
    """
    lines = answer.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    matchers = (difflib.SequenceMatcher(None, code, reference) for reference in question.references)
    return max(round(100 * matcher.ratio()) / 100 for matcher in matchers)


def first_line(answer: str) -> str:
    """What comes before the second line; a base model goes on with further examples."""
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
