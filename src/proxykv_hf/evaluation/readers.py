"""Examples from files of JSON lines: our own, LongBench's and RULER's.

``read(path, format)`` reads every line that can be read and collects what is wrong with the others.
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
        line: Its number, from 1.
        field: The field that is missing or wrong; ``"line"`` where the whole line is.
        problem: What was expected, and what came.
    """

    line: int
    field: str
    problem: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.field}: {self.problem}"


@dataclass(frozen=True)
class Reading:
    """What a file holds.

    Args:
        examples: Of all lines that could be read.
        metrics: The metric's name for each task among them.
        errors: Of all lines that could not.
    """

    examples: tuple[Example, ...]
    metrics: dict[str, str]
    errors: tuple[LineError, ...]


class _FieldError(Exception):
    """A field's name, and what is wrong with it."""


class _Fields:
    """The fields of one line, checked as they are taken."""

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
        """A list of strings, none blank: any answer holds that. If optional, it may be empty, null or missing."""
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
            raise self.wrong(name, "a number from 1")
        return value

    def one_of(self, name: str, known: dict[str, Any]) -> str:
        value = self.text(name)
        if value not in known:
            raise self.wrong(name, f"one of {', '.join(sorted(known))}")
        return value

    def list(self, name: str) -> list[_Fields]:
        """A list of objects, not empty."""
        value = self._values.get(name)
        if not isinstance(value, list) or not value:
            raise self.wrong(name, "a list of at least one object")
        return [_Fields(item, f"{self._prefix}{name}[{place}].") for place, item in enumerate(value)]

    def wrong(self, name: str, expected: str) -> _FieldError:
        came = _short(self._values[name]) if name in self._values else "no such field"
        return _FieldError(f"{self._prefix}{name}", f"expected {expected}, got {came}")


def _is_text(value: Any) -> bool:
    """Whether it is a string of Unicode; JSON may hold half of an emoji."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=not _is_text(value))
    return text if len(text) <= 60 else f"{text[:57]}…"


def read(path: Path, format: str) -> Reading:
    """All examples of a file.

    Args:
        path: A file of JSON lines, in UTF-8; blank lines are passed over.
        format: ``"proxykv"``, ``"longbench"`` or ``"ruler"``; see `read_own`, `read_longbench` and `read_ruler`.

    Raises:
        InvalidInputError: No such format or file. What is wrong inside the file is in `Reading.errors`.
    """
    if format not in FORMATS:
        raise InvalidInputError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    if not path.is_file():
        raise InvalidInputError(f"expected a file of JSON lines, but {path} is none")
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
                raise _FieldError("name", f"expected another one in each line, got {example.name} again")
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
    """A line of our own format, one example.

    ``context`` (string), ``questions`` (list), ``metric`` (of `metrics.METRICS`), and, if wanted, ``task`` (else the
    file's name) and ``name`` (else the line's number). Each question has the fields of `task.Question`: ``text``
    and ``references`` (strings), and, if wanted, ``answer_prefix``, ``max_new_tokens`` and ``choices``, which
    ``classification`` cannot do without.
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
    """Refuse what a classification could only score 0, whatever the answer; the names are those of the fields."""
    if metric != "classification":
        return
    if not question.choices:
        raise fields.wrong(choices, "the classes, a list of strings")
    if not set(question.references).issubset(question.choices):
        raise fields.wrong(references, f"some of {choices}")


def read_longbench(fields: _Fields, path: Path, number: int) -> tuple[Example, str]:
    """A line of LongBench (THUDM/LongBench), of one of its English data sets.

    ``dataset``, ``context``, ``input``, ``answers`` and, for classes, ``all_classes``; other fields are passed over.
    ``dataset`` may be that of LongBench-E, with ``_e`` at its end. LongBench asks some data sets without a chat
    template; here all are asked with the model's, if it has one.
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


#: How RULER's questions begin, their metric and longest answer; the last one in a text is its own.
RULER_QUESTIONS = (
    ("What are all the special magic ", "string_match_all", 128),
    ("What is the special magic ", "string_match_all", 128),
    ("Question: Find all variables that are assigned the value ", "string_match_all", 30),
    ("Question: What are the 10 most common words ", "string_match_all", 120),
    ("Question: Do not provide any explanation. Please ignore the dots ", "string_match_all", 50),
    ("Answer the question based on the given documents. ", "string_match_part", 32),
)


def read_ruler(fields: _Fields, path: Path, number: int) -> tuple[Example, str]:
    """A line that RULER's ``prepare.py`` wrote (``--model_template_type base``, the chat template being ours).

    ``input`` and ``outputs``, and ``answer_prefix`` where the version writes one. RULER gives document and question as
    one text; what comes last and begins like one of its questions is taken for the question, with the white space
    before it, and all before for the context. A text without any such beginning is an error: compressed as a whole it
    would not be query-agnostic. The task is named after the file, or after its folder where RULER called the file
    ``validation.jsonl`` or ``test.jsonl``.
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
