"""The file of an evaluation: a header, and a JSON line for each example, question and cell.

A run that was stopped can be continued. Methods, ratios, tasks and examples may be added to a file later.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidInputError
from ..files import write_whole

FORMAT = 1
#: How every file begins; if the first write was cut short, the file holds a part of this.
BEGINNING = b'{"header": {"format": '
#: Header fields that all runs of one file, and all files of one report, must share.
SAME = ("format", "target", "target_weights", "dtype", "tokens", "seed", "query_aware", "wording", "data")
#: Header fields about the run, which may differ from run to run.
RUN = ("versions", "hardware", "commit", "command")
#: All fields of a header.
HEADER = (*SAME, *RUN, "mapper", "allocation", "tasks", "examples", "methods", "ratios", "identities")
#: The fields that identify a row. Its field ``block`` says how many rows were written together with it.
KEY = ("task", "example", "question", "method", "allocation", "ratio")

Row = dict[str, Any]
Key = tuple[Any, ...]


def key_of(row: Row) -> Key:
    """The values that identify this row."""
    return tuple(row[name] for name in KEY)


class RowFile:
    """The rows on disk; one example's rows are added at a time.

    Args:
        path: The file; created if it does not exist.
        header: The header of this run, with all fields of ``HEADER``. ``tasks`` maps tasks to metrics, ``examples``
            maps ``"TASK NAME"`` to fingerprints, ``identities`` maps methods to identities.
        redo: Methods whose rows are all dropped, even the rows of tasks and ratios that are not in this run.

    Raises:
        InvalidInputError: The file is not one of ours, is damaged, or holds results that do not mix with this run's.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], redo: Sequence[str] = ()) -> None:
        self.path = path
        before, rows = _read(path)
        kept = _without_torn_block(rows)
        if any(row["method"] in redo for row in kept):  # a block that lost rows is no longer whole
            kept = [row | {"block": 1} for row in kept if row["method"] not in redo]
        if before is not None:
            _check(path, before, header, {row["method"] for row in kept})
            header = _merged(before, header)
        self.rows = {key_of(row): row for row in kept}
        text = "".join(map(_line, [{"header": header}, *kept]))
        if not path.is_file() or path.read_bytes() != text.encode():
            write_whole(path, text.encode())

    def append(self, rows: Sequence[Row]) -> None:
        """Add the rows of one example, in one write."""
        rows = [row | {"block": len(rows)} for row in rows]
        with self.path.open("ab") as file:
            file.write("".join(map(_line, rows)).encode())
        self.rows |= {key_of(row): row for row in rows}


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, allow_nan=False) + "\n"


def _read(path: Path) -> tuple[dict[str, Any] | None, list[Row]]:
    """The header and the rows, without an incomplete last line; None for the header if it is not complete yet."""
    if not path.exists():
        return None, []
    *lines, torn = path.read_bytes().split(b"\n")
    if not lines:
        if torn[: len(BEGINNING)] != BEGINNING[: len(torn)]:
            raise InvalidInputError(
                f"{path}, line 1: expected a header as `proxykv evaluate` writes it, got other text: give another --out"
            )
        return None, []
    objects: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            if wrong := _wrong_header(found["header"]) if number == 1 else _wrong_row(found):
                raise ValueError(wrong)
        except (ValueError, KeyError, TypeError) as error:
            what = "a header" if number == 1 else "a row"
            raise InvalidInputError(
                f"{path}, line {number}: expected {what} as `proxykv evaluate` writes it, got {type(error).__name__}: "
                f"{error}: give another --out, or delete the line"
            ) from error
        objects.append(found)
    return objects[0]["header"], objects[1:]


def _wrong_header(header: Any) -> str | None:
    """The first error in a header, in words; None if there is none."""
    kinds: dict[str, type] = {"allocation": str, "tasks": dict, "examples": dict, "identities": dict}
    kinds |= {"methods": list, "ratios": list}
    if not are_runs(header.get("later", [])):
        return "later is not a list of runs"
    fields = ((name, header[name], kinds.get(name, object)) for name in HEADER)
    wrong = (f"{name} is not a {kind.__name__}" for name, value, kind in fields if not isinstance(value, kind))
    return next(wrong, None)


def are_runs(later: Any) -> bool:
    """Whether a header's field ``later`` is a list of runs."""
    return isinstance(later, list) and all(isinstance(run, dict) for run in later)


def _wrong_row(row: Any) -> str | None:
    """The first error in a row, in words; None if there is none."""
    block = row["block"]
    if type(block) is not int or block < 1:
        return f"block is {block!r}, not an integer of at least 1"
    scalars = (str, int, float, type(None))
    return next((f"{name} is not a string or number" for name in KEY if not isinstance(row[name], scalars)), None)


def _without_torn_block(rows: list[Row]) -> list[Row]:
    """``rows`` without an incomplete block at their end, which a write that was cut short has left."""

    def block(row: Row) -> Key:
        return row["task"], row["example"], row["block"]

    together = len(list(itertools.takewhile(lambda row: block(row) == block(rows[-1]), reversed(rows))))
    return rows[: len(rows) - together % rows[-1]["block"]] if rows else rows


def _check(path: Path, before: Mapping[str, Any], header: Mapping[str, Any], present: Iterable[str]) -> None:
    """Refuse a file whose rows do not mix with this run's."""
    for name in SAME:
        if before.get(name) != header[name]:
            raise InvalidInputError(
                f"{path} holds results of {name} {before.get(name)!r}, and this run has {header[name]!r}: give "
                "another --out"
            )
    for task, metric in header["tasks"].items():
        if before["tasks"].get(task, metric) != metric:
            raise InvalidInputError(
                f"{path} holds scores of task {task} by {before['tasks'][task]}, and this run has {metric}: give "
                "another --out"
            )
    for example, fingerprint in header["examples"].items():
        if before["examples"].get(example, fingerprint) != fingerprint:
            raise InvalidInputError(
                f"{path} holds answers about another text of example {example}, whose task or file has changed: give "
                "another --out"
            )
    for method in present:
        old, new = before["identities"].get(method), header["identities"].get(method)
        if new is not None and old != new:
            raise InvalidInputError(
                f"{path} holds results of another {method} ({old}; now {new}): give another --out, or --redo {method} "
                "to drop those rows and run it again"
            )


def _merged(before: Mapping[str, Any], header: Mapping[str, Any]) -> dict[str, Any]:
    """The file's header after this run: the first run's fields, the tasks, methods etc. of all, and the later runs."""
    merged = dict(before)
    for name in ("tasks", "examples", "identities"):
        merged[name] = before[name] | header[name]
    for name in ("methods", "ratios"):
        merged[name] = list(dict.fromkeys([*before[name], *header[name]]))
    allocations = [*before["allocation"].split("+"), *header["allocation"].split("+")]
    merged["allocation"] = "+".join(dict.fromkeys(allocations))
    merged["mapper"] = header["mapper"] or before["mapper"]
    run = {name: header[name] for name in RUN}
    runs = [{name: before[name] for name in RUN}, *before.get("later", [])]
    if run not in runs:
        merged["later"] = [*runs[1:], run]
    return merged
