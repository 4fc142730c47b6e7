"""Figures from outcomes: scores, recovery and paired differences, for each task and over all tasks."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InvalidInputError
from .cells import WHOLE, Cell, Variant
from .outcomes import Outcome, Outcomes, Rows
from .statistics import Estimate, Floats, Resampler, Sampled

#: If the full cache scores less in a task, the task is beyond the model and cannot show what pruning loses.
WITHIN_REACH = 0.5
#: The default methods: recovery is relative to the reference, and the other methods are compared with ours.
DEFAULT_REFERENCE, DEFAULT_OURS = "kvzip", "proxykv"
#: If the reference scores less, a share of its score says nothing, but the difference in nll still does.
MEANINGFUL = 0.3

#: The means from which figures are computed, by name.
Parts = dict[str, Sampled]


@dataclass(frozen=True)
class Figures:
    """The figures of a cell, in one task or over several tasks.

    Args:
        questions: The number of questions that were answered.
        score: Mean score.
        nll: Mean negative log-likelihood of the reference answers, in nats per token; None if there is no reference.
        kept: Mean share of the full cache's bytes.
        of_full: Score over the full cache's score, on the questions that both answered; None if the full cache's
            score is 0.
        of_reference: Score over the reference's score at the same ratio, on the questions that both answered; None if
            the reference is missing or ``reference_score`` is under ``MEANINGFUL``.
        reference_score: The reference's score at the same ratio, on all questions that it answered. It is the same for
            every variant, so that either all variants have a quotient or none has.
        nll_over_reference: nll minus the reference's nll: above 0 if the right answers are less likely.
        lead: The score of ours minus this score, on the questions that both answered; None for ours itself, or if ours
            is missing.
        lead_nll: The nll of ours minus this nll: below 0 if ours is better.
        pairs: The number of questions that both ours and this cell answered.
    """

    questions: int
    score: Estimate
    nll: Estimate | None
    kept: float
    of_full: Estimate | None
    of_reference: Estimate | None
    reference_score: float | None
    nll_over_reference: Estimate | None
    lead: Estimate | None
    lead_nll: Estimate | None
    pairs: int


@dataclass(frozen=True)
class TaskSummary:
    """The figures of one task.

    Args:
        metric: The name of the task's metric.
        examples: The number of contexts.
        questions: The number of questions about them that any method answered.
        figures: By cell, including the full cache.
    """

    metric: str
    examples: int
    questions: int
    figures: dict[Cell, Figures]

    @property
    def full(self) -> Figures:
        """The figures of the full cache."""
        return self.figures[WHOLE]

    @property
    def within_reach(self) -> bool:
        return self.full.score.value >= WITHIN_REACH


@dataclass(frozen=True)
class Summary:
    """All figures of a report.

    Args:
        reference: The variant that recovery is relative to; None if the files do not have it.
        ours: The variant that the others are compared with; None if the files do not have it.
        samples: The number of resamples behind each interval.
        tasks: The tasks by name.
        overall: Means over the tasks within the model's reach, each task with the same weight; only cells that all
            these tasks have.
        shared_tasks: The tasks within reach that have questions which all variants answered, at the ratios that all
            variants have.
        shared: The means over these questions alone; empty if no question is left out, or none is left.
    """

    reference: Variant | None
    ours: Variant | None
    samples: int
    tasks: dict[str, TaskSummary]
    overall: dict[Cell, Figures]
    shared_tasks: list[str]
    shared: dict[Cell, Figures]

    @property
    def judged(self) -> list[str]:
        """The tasks within the model's reach, over which the means are taken."""
        return [name for name, task in self.tasks.items() if task.within_reach]

    def cells(self) -> list[Cell]:
        """The cells of all tasks, without the full cache."""
        all_cells = (cell for task in self.tasks.values() for cell in task.figures)
        return list(dict.fromkeys(cell for cell in all_cells if cell != WHOLE))

    def ratios(self) -> list[float]:
        """The ratios of all variants that prune, the largest first."""
        return sorted({cell.ratio for cell in self.cells()}, reverse=True)

    def variants(self) -> list[Variant]:
        """The variants that prune, the best first.

        They are ordered by their mean score over the ratios that all variants have, or over their own ratios if no
        ratio is common to all. If there are no means over tasks, the scores of the single tasks count. A variant
        without a score comes last.
        """
        scores: dict[Cell, list[float]] = {}
        for figures in [self.overall] if self.overall else [task.figures for task in self.tasks.values()]:
            for cell, found in figures.items():
                scores.setdefault(cell, []).append(found.score.value)
        common = common_ratios(scores) or set(self.ratios())

        def mean(variant: Variant) -> float:
            cells = (cell for cell in scores if cell.variant == variant and cell.ratio in common)
            own = [score for cell in cells for score in scores[cell]]
            return float(np.mean(own)) if own else -1.0

        return sorted(dict.fromkeys(cell.variant for cell in self.cells()), key=mean, reverse=True)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""

        def entries(figures: Mapping[Cell, Figures]) -> list[dict[str, Any]]:
            return [dataclasses.asdict(cell) | dataclasses.asdict(found) for cell, found in figures.items()]

        return {
            "reference": None if self.reference is None else dataclasses.asdict(self.reference),
            "ours": None if self.ours is None else dataclasses.asdict(self.ours),
            "samples": self.samples,
            "judged": self.judged,
            "overall": entries(self.overall),
            "shared_tasks": self.shared_tasks,
            "shared": entries(self.shared),
            "tasks": {
                name: {
                    "metric": task.metric,
                    "examples": task.examples,
                    "questions": task.questions,
                    "within_reach": task.within_reach,
                    "figures": entries(task.figures),
                }
                for name, task in self.tasks.items()
            },
        }


def summarize(
    outcomes: Outcomes, reference: str | None = None, ours: str | None = None, samples: int = 10_000, seed: int = 0
) -> Summary:
    """Compute all figures.

    Args:
        outcomes: From `read_outcomes`.
        reference: The variant that recovery is relative to, as ``METHOD`` or ``METHOD:ALLOCATION``; None for the
            default, if the files have it.
        ours: The variant that the others are compared with, in the same form.
        samples: The number of resamples behind each interval.
        seed: The seed of the resamples. The resamples of a task do not depend on the other tasks.

    Raises:
        InvalidInputError: ``reference`` or ``ours`` is not in the files.
    """
    yardstick = _named(outcomes, "reference", reference, DEFAULT_REFERENCE)
    own = _named(outcomes, "ours", ours, DEFAULT_OURS)

    def tables_of(rows: Mapping[str, Rows]) -> dict[str, _Table]:
        return {
            name: _Table(
                asked, Resampler([example for example, _ in asked], samples, [seed, *name.encode()]), yardstick, own
            )
            for name, asked in rows.items()
        }

    tables = tables_of(outcomes.rows)
    tasks = {
        name: TaskSummary(outcomes.tasks[name], table.resampler.examples, len(outcomes.rows[name]), table.figures())
        for name, table in tables.items()
    }
    judged = {name: outcomes.rows[name] for name, task in tasks.items() if task.within_reach}
    shared = tables_of(_answered_by_all(judged))
    overall = _over_tasks([tables[name] for name in judged])
    return Summary(yardstick, own, samples, tasks, overall, list(shared), _over_tasks(list(shared.values())))


def _named(outcomes: Outcomes, option: str, name: str | None, default: str) -> Variant | None:
    """The variant of this name; without a name the default variant, or None if the files do not have it."""
    try:
        return outcomes.variant(default if name is None else name)
    except InvalidInputError as error:
        if name is None:
            return None
        raise InvalidInputError(f"--{option}: {error}") from error


def common_ratios(cells: Iterable[Cell]) -> set[float]:
    """The ratios that all variants that prune have in common."""
    ratios: dict[Variant, set[float]] = {}
    for cell in cells:
        if cell != WHOLE:
            ratios.setdefault(cell.variant, set()).add(cell.ratio)
    return set.intersection(*ratios.values()) if ratios else set()


def _answered_by_all(tasks: Mapping[str, Rows]) -> dict[str, Rows]:
    """The questions that all variants answered at the ratios that all have, with these answers.

    Empty if every variant answered every question.
    """
    cells = {cell for rows in tasks.values() for row in rows.values() for cell in row}
    ratios = common_ratios(cells)
    wanted = {cell for cell in cells if cell == WHOLE or cell.ratio in ratios}
    shared: dict[str, Rows] = {}
    for name, rows in tasks.items():
        for asked, row in rows.items():
            if ratios and wanted <= row.keys():
                shared.setdefault(name, {})[asked] = {cell: row[cell] for cell in row if cell in wanted}
    everything = sum(map(len, shared.values())) == sum(map(len, tasks.values()))
    return {} if everything else shared


class _Table:
    """The outcomes of one task as columns: the values of each cell, NaN where it has no answer.

    Args:
        rows: Outcomes by question and cell.
        resampler: A resampler of the examples of these questions, in the same order.
        reference: The variant that recovery is relative to, or None.
        ours: The variant that the others are compared with, or None.
    """

    def __init__(self, rows: Rows, resampler: Resampler, reference: Variant | None, ours: Variant | None) -> None:
        self.resampler, self._reference, self._ours = resampler, reference, ours
        nothing = Outcome(math.nan, math.nan, math.nan)
        self._columns = {
            cell: {
                name: np.array([getattr(row.get(cell, nothing), name) for row in rows.values()])  # [U]
                for name in ("score", "nll", "kept")
            }
            for cell in dict.fromkeys(cell for row in rows.values() for cell in row)
        }
        self.parts = {cell: self._parts(cell) for cell in self._columns}
        self.counts = {cell: self._counts(cell) for cell in self._columns}

    def figures(self) -> dict[Cell, Figures]:
        """The figures of all cells."""
        return {cell: _figures(parts, *self.counts[cell]) for cell, parts in self.parts.items()}

    def _column(self, variant: Variant | None, ratio: float) -> dict[str, Floats] | None:
        return None if variant is None else self._columns.get(variant.at(ratio))

    def _parts(self, cell: Cell) -> Parts:
        """The means from which a cell's figures are computed, without those that have no values."""
        own = self._columns[cell]
        parts = {name: self.resampler.mean(own[name]) for name in ("score", "nll", "kept")}
        parts |= self._both("full", own["score"], self._columns[WHOLE]["score"])
        beside = self._column(self._reference, cell.ratio)
        if beside is not None:
            parts |= self._both("reference", own["score"], beside["score"])
            parts["whole_reference"] = self.resampler.mean(beside["score"])
            parts["nll_over_reference"] = self.resampler.mean(own["nll"] - beside["nll"])
        first = self._column(self._ours, cell.ratio)
        if first is not None and cell.variant != self._ours:
            parts["lead"] = self.resampler.mean(first["score"] - own["score"])
            parts["lead_nll"] = self.resampler.mean(first["nll"] - own["nll"])
        return {name: part for name, part in parts.items() if part is not None}

    def _both(self, name: str, own: Floats, other: Floats) -> dict[str, Sampled | None]:
        """The mean of either score, on the questions that both answered."""
        both = np.where(np.isnan(own), np.nan, other)
        return {
            f"beside_{name}": self.resampler.mean(np.where(np.isnan(other), np.nan, own)),
            name: self.resampler.mean(both),
        }

    def _counts(self, cell: Cell) -> tuple[int, int]:
        """The number of questions that the cell answered, and that both the cell and ours answered."""
        answered = ~np.isnan(self._columns[cell]["score"])
        first = self._column(self._ours, cell.ratio)
        both = 0 if first is None else np.count_nonzero(answered & ~np.isnan(first["score"]))
        return int(np.count_nonzero(answered)), int(both)


def _over_tasks(tables: Sequence[_Table]) -> dict[Cell, Figures]:
    """Means over tasks, each task with the same weight, of the cells and parts that all tasks have."""
    found = {}
    for cell in tables[0].parts if tables else ():
        if all(cell in table.parts for table in tables):
            each = [table.parts[cell] for table in tables]
            names = [name for name in each[0] if all(name in parts for parts in each)]
            means = {
                name: functools.reduce(operator.add, (parts[name] for parts in each)) / len(each) for name in names
            }
            questions, pairs = map(sum, zip(*(table.counts[cell] for table in tables), strict=True))
            found[cell] = _figures(means, questions, pairs)
    return found


def _figures(parts: Parts, questions: int, pairs: int) -> Figures:
    def estimate(name: str) -> Estimate | None:
        return parts[name].estimate() if name in parts else None

    def recovery(of: str) -> Estimate | None:
        return (parts[f"beside_{of}"] / parts[of]).estimate() if of in parts and parts[of].value else None

    reference_score = parts["whole_reference"].value if "whole_reference" in parts else None

    return Figures(
        questions=questions,
        score=parts["score"].estimate(),
        nll=estimate("nll"),
        kept=parts["kept"].value,
        of_full=recovery("full"),
        of_reference=recovery("reference") if reference_score is not None and reference_score >= MEANINGFUL else None,
        reference_score=reference_score,
        nll_over_reference=estimate("nll_over_reference"),
        lead=estimate("lead"),
        lead_nll=estimate("lead_nll"),
        pairs=pairs,
    )
