"""Reads and checks the files that `proxykv evaluate` writes: a header, and one row for each answer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from ..errors import InvalidInputError
from .cells import WHOLE, Cell, Variant
from .methods import Allocation
from .rows import FORMAT, SAME, are_runs


@dataclass(frozen=True)
class Outcome:
    """One answer.

    Args:
        score: The score by the task's metric, 0 to 1.
        nll: Mean negative log-likelihood of the reference answer, in nats per token; NaN where the file has null.
        kept: The bytes of the cache over the bytes of the full cache.
    """

    score: float
    nll: float
    kept: float


#: A question that all methods are asked: ``(example, question)``.
Asked = tuple[str, int]
#: The outcomes of one task, by question and cell.
Rows = dict[Asked, dict[Cell, Outcome]]


@dataclass
class Outcomes:
    """The content of the files.

    Args:
        files: The names of the files.
        headers: The headers of these files, in the same order.
        tasks: The metric of each task.
        rows: The outcomes of each task.
    """

    files: list[str] = field(default_factory=list)
    headers: list[dict[str, Any]] = field(default_factory=list)
    tasks: dict[str, str] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)

    def variants(self) -> list[Variant]:
        """All variants in the files, in the order of their first rows."""
        return list(dict.fromkeys(cell.variant for rows in self.rows.values() for row in rows.values() for cell in row))

    def of_tasks(self, names: Sequence[str]) -> Outcomes:
        """The outcomes of these tasks alone.

        Raises:
            InvalidInputError: A task is not in the files; the message lists those that are.
        """
        if unknown := [name for name in names if name not in self.rows]:
            raise InvalidInputError(f"unknown tasks {', '.join(unknown)}: expected some of {', '.join(self.rows)}")
        return Outcomes(
            self.files,
            self.headers,
            {name: self.tasks[name] for name in self.tasks if name in names},
            {name: self.rows[name] for name in self.rows if name in names},
        )

    def variant(self, name: str) -> Variant:
        """The variant that ``METHOD`` or ``METHOD:ALLOCATION`` names; of several allocations, ``global``.

        Raises:
            InvalidInputError: The variant is not in the files, or it is the full cache, which has no ratio in common
                with the others. The message lists the variants that can be named.
        """
        method, _, allocation = name.partition(":")
        pruned = [v for v in self.variants() if v.method != WHOLE.method]
        there = [v for v in pruned if v.method == method and allocation in ("", v.allocation)]
        if not there:
            known = ", ".join(sorted(f"{v.method}:{v.allocation}" for v in pruned)) or "none"
            hint = "; recovery of the full cache is in every report" if method == WHOLE.method else ""
            raise InvalidInputError(
                f"expected a method that prunes and is in {', '.join(self.files)}, got {name!r}: the "
                f"files have {known}{hint}"
            )
        return next((v for v in there if v.allocation == "global"), there[0])


def read_outcomes(paths: Sequence[Path]) -> Outcomes:
    """Read files of one experiment, each with other tasks, examples, methods or ratios.

    A row that is in two files counts once.

    Raises:
        InvalidInputError: `proxykv evaluate` did not write a file (the message names line and field), the files are of
            different experiments, a row occurs twice with different scores, there are no rows, or a task has no rows
            of the full cache.
    """
    outcomes = Outcomes()
    for path in paths:
        _read(path, outcomes)
    if not outcomes.rows:
        raise InvalidInputError(f"expected rows after the header, got none in {', '.join(outcomes.files)}")
    for task, asked in outcomes.rows.items():
        if not any(WHOLE in row for row in asked.values()):
            raise InvalidInputError(
                f"task {task}: expected rows of the method 'full', with which all methods are compared, got none"
            )
    return outcomes


def _read(path: Path, outcomes: Outcomes) -> None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"expected JSON lines in UTF-8, but {path} is not UTF-8: {error}") from error
    if not lines:
        raise InvalidInputError(f"expected a header and rows, but {path} is empty")
    _add_header(_object(path, 1, lines[0]).get("header"), path, outcomes)
    outcomes.files.append(str(path))
    for number, line in enumerate(lines[1:], 2):
        _add_row(_object(path, number, line), f"{path}, line {number}", outcomes)


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        hint = "" if line.endswith("\n") else "; if a run was cut short here, let `proxykv evaluate` continue it"
        raise InvalidInputError(f"{path}, line {number}: expected JSON, got {error}{hint}") from error
    if not isinstance(value, dict):
        raise InvalidInputError(f"{path}, line {number}: expected a JSON object, got {type(value).__name__}")
    return value


def _add_header(header: Any, path: Path, outcomes: Outcomes) -> None:
    where = f"{path}, line 1"
    if not isinstance(header, dict):
        raise InvalidInputError(f"{where}: expected a header, as `proxykv evaluate` writes it, got none")
    if header.get("format") != FORMAT:
        raise InvalidInputError(f"{where}: header.format: expected {FORMAT}, got {header.get('format')!r}")
    for name in SAME:
        if name not in header:
            raise InvalidInputError(f"{where}: header.{name}: expected a value, got none")
    if not are_runs(header.get("later", [])):
        raise InvalidInputError(f"{where}: header.later: expected a list of runs, got {header['later']!r}")
    tasks = header.get("tasks")
    if not isinstance(tasks, dict):
        raise InvalidInputError(f"{where}: header.tasks: expected metrics by task, got {tasks!r}")
    for other, before in zip(outcomes.files, outcomes.headers, strict=True):
        _check_same(before, header, other, path)
    for task, metric in tasks.items():
        if outcomes.tasks.setdefault(task, metric) != metric:
            raise InvalidInputError(
                f"{where}: task {task}: expected the metric of the other files, {outcomes.tasks[task]}, got {metric}"
            )
    outcomes.headers.append(header)


def _check_same(before: dict[str, Any], header: dict[str, Any], other: str, path: Path) -> None:
    """Refuse files whose rows do not belong in one table."""
    pairs = {name: (before[name], header[name]) for name in SAME}
    for kind in ("examples", "identities"):  # fingerprints of texts; weights and settings of methods
        first, second = before.get(kind, {}), header.get(kind, {})
        pairs |= {name: (first[name], second[name]) for name in sorted(first.keys() & second.keys())}
    for name, (first, second) in pairs.items():
        if first != second:
            raise InvalidInputError(
                f"expected files of one experiment, but {name} is {first!r} in {other} and {second!r} in {path}: "
                "report them one by one"
            )


def _add_row(row: dict[str, Any], where: str, outcomes: Outcomes) -> None:
    def take(name: str, what: str, good: Callable[[Any], bool]) -> Any:
        if name not in row:
            raise InvalidInputError(f"{where}: {name}: expected {what}, but the field is missing")
        if not good(row[name]):
            raise InvalidInputError(f"{where}: {name}: expected {what}, got {row[name]!r}")
        return row[name]

    task = take(
        "task",
        f"one of the header's tasks ({', '.join(outcomes.tasks)})",
        lambda v: _is_name(v) and v in outcomes.tasks,
    )
    asked = (
        take("example", "a name", _is_name),
        take("question", "an integer of at least 0", lambda v: type(v) is int and v >= 0),
    )
    method = take("method", "a name", _is_name)
    if method == WHOLE.method:
        cell = WHOLE
    else:
        ratio = take("ratio", "a number in (0, 1]", lambda v: _is_number(v) and 0 < v <= 1)
        allocations = get_args(Allocation)
        allocation = take("allocation", " or ".join(allocations), lambda v: v in allocations)
        cell = Cell(method, allocation, float(ratio))
    full = take("bytes_full", "a number above 0", lambda v: _is_number(v) and v > 0)
    outcome = Outcome(
        score=float(take("score", "a number from 0 to 1", lambda v: _is_number(v) and 0 <= v <= 1)),
        nll=math.nan if row.get("nll", 0) is None else float(take("nll", "a number or null", _is_number)),
        kept=take("bytes", "a number of at least 0", lambda v: _is_number(v) and v >= 0) / full,
    )
    known = outcomes.rows.setdefault(task, {}).setdefault(asked, {}).setdefault(cell, outcome)
    if known.score != outcome.score:
        raise InvalidInputError(
            f"{where}: task {task}, example {asked[0]}, question {asked[1]}, {cell} occurs twice, with scores "
            f"{known.score:g} and {outcome.score:g}: keep one of the rows"
        )


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
