"""Reads examples from files of JSON lines, in our own format, LongBench's or RULER's.

``read(path, format)`` reads every valid line and collects the errors in the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidInputError
from .longbench import DATA_SETS
from .metrics import METRICS
from .task import Example, Question


@dataclass(frozen=True)
class LineError:
    """What is wrong with one line.

    Args:
        line: The number of the line, from 1.
        field: The field that is missing or wrong; ``"line"`` if the whole line is wrong.
        problem: What was expected, and what came.
    """

    line: int
    field: str
    problem: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.field}: {self.problem}"


@dataclass(frozen=True)
class Reading:
    """The content of a file.

    Args:
        examples: The examples in all valid lines.
        metrics: The name of the metric of each of their tasks.
        errors: The errors in all other lines.
    """

    examples: tuple[Example, ...]
    metrics: dict[str, str]
    errors: tuple[LineError, ...]


class _FieldError(Exception):
    """A field's name, and what is wrong with it."""


class _Fields:
    """The fields of one line; each is checked when it is read."""

    def __init__(self, values: Any, prefix: str = "") -> None:
        self._prefix = prefix
        if not isinstance(values, dict):
            raise _FieldError(prefix.rstrip(".") or "line", f"expected a JSON object, got {_short(values)}")
        self._values = values

    def text(self, name: str, default: str | None = None) -> str:
        value = self._values.get(name, default)
        if not _is_text(value):
            raise self.wrong(name, "a string")
        return str(value)

    def filled(self, name: str) -> str:
        """A string that is not blank."""
        value = self.text(name)
        if not value.strip():
            raise self.wrong(name, "a string that is not blank")
        return value

    def texts(self, name: str, *, optional: bool = False) -> tuple[str, ...]:
        """A list of strings that are not blank, since a blank string is in any answer.

        An optional list may be empty, null or missing.
        """
        value = self._values.get(name)
        if value is None and optional:
            return ()
        if not isinstance(value, list) or not all(_is_text(item) and item.strip() for item in value):
            raise self.wrong(name, "a list of strings that are not blank")
        if not value and not optional:
            raise self.wrong(name, "at least one string")
        return tuple(value)

    def positive(self, name: str, default: int) -> int:
        value = self._values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "an integer of at least 1")
        return value

    def one_of(self, name: str, known: dict[str, Any]) -> str:
        value = self.text(name)
        if value not in known:
            raise self.wrong(name, f"one of {', '.join(sorted(known))}")
        return value

    def list(self, name: str) -> list[_Fields]:
        """A list of at least one object."""
        value = self._values.get(name)
        if not isinstance(value, list) or not value:
            raise self.wrong(name, "a list of at least one object")
        return [_Fields(item, f"{self._prefix}{name}[{place}].") for place, item in enumerate(value)]

    def wrong(self, name: str, expected: str) -> _FieldError:
        came = _short(self._values[name]) if name in self._values else "no such field"
        return _FieldError(f"{self._prefix}{name}", f"expected {expected}, got {came}")


def _is_text(value: Any) -> bool:
    """Whether ``value`` is a valid Unicode string; a JSON string may hold half of a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=not _is_text(value))
    return text if len(text) <= 60 else f"{text[:57]}…"


def read(path: Path, format: str) -> Reading:
    """Read all examples in a file.

    Args:
        path: A file of JSON lines, in UTF-8; blank lines are ignored.
        format: ``"proxykv"``, ``"longbench"`` or ``"ruler"``; see `read_own`, `read_longbench` and `read_ruler`.

    Raises:
        InvalidInputError: The format or the file does not exist. Errors inside the file are in `Reading.errors`.
    """
    if format not in FORMATS:
        raise InvalidInputError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    if not path.is_file():
        raise InvalidInputError(f"expected a file of JSON lines, but {path} is not a file")
    examples: list[Example] = []
    metrics: dict[str, str] = {}
    errors: list[LineError] = []
    names: set[tuple[str, str]] = set()
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            example, metric = FORMATS[format](_Fields(_parsed(line)), path, number)
            if metrics.setdefault(example.task, metric) != metric:
                raise _FieldError("metric", f"expected {metrics[example.task]} as in the lines before, got {metric}")
            if (example.task, example.name) in names:
                raise _FieldError("name", f"expected a different name in each line, got {example.name} again")
        except _FieldError as error:
            errors.append(LineError(number, *error.args))
        else:
            names.add((example.task, example.name))
            examples.append(example)
    return Reading(tuple(examples), {example.task: metrics[example.task] for example in examples}, tuple(errors))


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _FieldError("line", f"expected JSON in UTF-8 ({error})") from error


def read_own(fields: _Fields, path: Path, number: int) -> tuple[Example, str]:
    """Read a line of our own format: one example.

    Its fields are ``context`` (string), ``questions`` (list), ``metric`` (a name in `metrics.METRICS`), and optionally
    ``task`` (default: the file's name) and ``name`` (default: the line's number). Each question has the fields of
    `task.Question`: ``text``, ``references`` (list of strings), and optionally ``answer_prefix``, ``max_new_tokens``
    and ``choices``, which are required with the metric ``classification``.
    """
    asked_of = fields.list("questions")
    questions = tuple(
        Question(
            asked.text("text"),
            asked.texts("references"),
            asked.text("answer_prefix", ""),
            asked.positive("max_new_tokens", 32),
            asked.texts("choices", optional=True),
        )
        for asked in asked_of
    )
    example = Example(
        fields.text("task", path.stem), fields.text("name", f"{number:05d}"), fields.filled("context"), questions
    )
    metric = fields.one_of("metric", METRICS)
    for asked, question in zip(asked_of, questions, strict=True):
        _check_classes(metric, question, asked, "references", "choices")
    return example, metric


def _check_classes(metric: str, question: Question, fields: _Fields, references: str, choices: str) -> None:
    """Refuse a question for which a classification is 0 whatever the answer.

    ``references`` and ``choices`` are the names of the fields.
    """
    if metric != "classification":
        return
    if not question.choices:
        raise fields.wrong(choices, "the classes, a list of strings")
    if not set(question.references).issubset(question.choices):
        raise fields.wrong(references, f"some of {choices}")


def read_longbench(fields: _Fields, path: Path, number: int) -> tuple[Example, str]:
    """Read a line of LongBench (THUDM/LongBench), from one of its English data sets.

    Its fields are ``dataset``, ``context``, ``input``, ``answers`` and, for classification, ``all_classes``; other
    fields are ignored. ``dataset`` may be a data set of LongBench-E, which ends in ``_e``. LongBench uses no chat
    template with some data sets; here the chat template of the model, if it has one, is used with all of them.
    """
    named = fields.text("dataset")
    task = named.removesuffix("_e")
    if task not in DATA_SETS:
        raise fields.wrong("dataset", f"one of {', '.join(DATA_SETS)}")
    form = DATA_SETS[task]
    question = Question(
        form.after.replace("{input}", fields.text("input")),
        fields.texts("answers"),
        max_new_tokens=form.max_new_tokens,
        choices=fields.texts("all_classes", optional=True),
    )
    _check_classes(form.metric, question, fields, "answers", "all_classes")
    return Example(named, f"{number:05d}", form.before + fields.filled("context"), (question,)), form.metric


#: How RULER's questions begin, their metric, and the length of the longest answer. The last match is a text's question.
RULER_QUESTIONS = (
    ("What are all the special magic ", "string_match_all", 128),
    ("What is the special magic ", "string_match_all", 128),
    ("Question: Find all variables that are assigned the value ", "string_match_all", 30),
    ("Question: What are the 10 most common words ", "string_match_all", 120),
    ("Question: Do not provide any explanation. Please ignore the dots ", "string_match_all", 50),
    ("Answer the question based on the given documents. ", "string_match_part", 32),
)


def read_ruler(fields: _Fields, path: Path, number: int) -> tuple[Example, str]:
    """Read a line that RULER's ``prepare.py`` wrote with ``--model_template_type base``; we add the chat template.

    Its fields are ``input``, ``outputs`` and, in some versions of RULER, ``answer_prefix``. RULER writes document and
    question as one text. The question begins at the last place that matches the beginning of one of RULER's questions,
    with the white space before it; the text before that is the context. A text without a match is an error: it could
    only be compressed together with its question. The task is named after the file, or after its folder if the file is
    called ``validation.jsonl`` or ``test.jsonl``, as RULER does.
    """
    text = fields.text("input")
    found = [
        (place, metric, longest)
        for beginning, metric, longest in RULER_QUESTIONS
        if (place := text.rfind(beginning)) > 0
    ]
    if not found:
        raise fields.wrong("input", "a text with one of RULER's questions at its end")
    place, metric, longest = max(found)
    context = text[:place].rstrip()
    if not context:
        raise fields.wrong("input", "a document before the question")
    task = path.resolve().parent.name if path.stem in ("validation", "test") else path.stem
    prefix = fields.text("answer_prefix", "").strip()
    question = Question(text[len(context) :], fields.texts("outputs"), prefix, longest)
    return Example(task, f"{number:05d}", context, (question,)), metric


FORMATS: dict[str, Callable[[_Fields, Path, int], tuple[Example, str]]] = {
    "proxykv": read_own,
    "longbench": read_longbench,
    "ruler": read_ruler,
}
