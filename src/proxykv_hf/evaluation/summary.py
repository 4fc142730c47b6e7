"""What outcomes say: scores, recovery and paired differences, of each task and over all of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .outcomes import FULL, Asked, Outcome, Outcomes, Point, Variant
from .statistics import Estimate, Floats, Resampler, Sampled

#: A task of which the full cache answers less is beyond the model: what is lost there cannot be seen.
WITHIN_REACH = 0.5
#: Where the reference itself scores less, a share of its score says nothing; the difference in nll does.
MEANINGFUL = 0.3

#: The means that figures are made of, by name.
Parts = dict[str, Sampled]


@dataclass(frozen=True)
class Figures:
    """A variant at a ratio, in one task or over several.

    Args:
        questions: How many it answered.
        score: Mean score.
        nll: Mean negative log-likelihood of the reference answers, nats per token; None without any.
        kept: Mean share of the full cache's bytes.
        of_full: Score over the full cache's, of the questions that both answered; None where that is 0.
        of_reference: Score over the reference's at this ratio, likewise; None where the reference is not there or
            scores under ``MEANINGFUL``.
        reference_score: The reference's score of those questions.
        nll_over_reference: nll minus the reference's: above 0 where less is left of the answers.
        lead: Ours minus this score, of the questions that both answered; None for ours and where ours is not there.
        lead_nll: Ours minus this nll: below 0 where ours leads.
        pairs: How many questions both answered.
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
    """One task.

    Args:
        metric: What scores its answers.
        examples: Contexts.
        questions: Asked of them, by any method.
        figures: By point, the full cache's among them.
    """

    metric: str
    examples: int
    questions: int
    figures: dict[Point, Figures]

    @property
    def full(self) -> Figures:
        """The full cache's."""
        return self.figures[FULL]

    @property
    def within_reach(self) -> bool:
        return self.full.score.value >= WITHIN_REACH


@dataclass(frozen=True)
class Summary:
    """All figures of a report.

    Args:
        reference: What recovery is relative to.
        ours: What the others are compared with.
        samples: Resamples of every interval.
        tasks: By name.
        overall: Means over the tasks within the model's reach, each task the same weight; only points that all of
            them have.
    """

    reference: Variant
    ours: Variant
    samples: int
    tasks: dict[str, TaskSummary]
    overall: dict[Point, Figures]

    @property
    def judged(self) -> list[str]:
        """The tasks that the means are taken over."""
        return [name for name, task in self.tasks.items() if task.within_reach]

    def points(self) -> list[Point]:
        """Of every task, the full cache's left out."""
        all_points = (point for task in self.tasks.values() for point in task.figures)
        return list(dict.fromkeys(point for point in all_points if point != FULL))

    def ratios(self) -> list[float]:
        """Of what prunes, the largest first."""
        return sorted({point.ratio for point in self.points()}, reverse=True)

    def variants(self) -> list[Variant]:
        """What prunes, the best first: by mean score over the ratios, of all tasks' where there is no mean."""
        scores: dict[Variant, list[float]] = {}
        for figures in [self.overall] if self.overall else [task.figures for task in self.tasks.values()]:
            for point, found in figures.items():
                scores.setdefault(point.variant, []).append(found.score.value)
        variants = dict.fromkeys(point.variant for point in self.points())
        return sorted(variants, key=lambda variant: -float(np.mean(scores.get(variant, [-1.0]))))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""

        def entries(figures: Mapping[Point, Figures]) -> list[dict[str, Any]]:
            return [
                dataclasses.asdict(point.variant) | {"ratio": point.ratio} | dataclasses.asdict(found)
                for point, found in figures.items()
            ]

        return {
            "reference": dataclasses.asdict(self.reference),
            "ours": dataclasses.asdict(self.ours),
            "samples": self.samples,
            "judged": self.judged,
            "overall": entries(self.overall),
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
    outcomes: Outcomes, reference: str = "kvzip", ours: str = "proxykv", samples: int = 10_000, seed: int = 0
) -> Summary:
    """All figures.

    Args:
        outcomes: From `read_outcomes`.
        reference: What recovery is relative to, ``METHOD`` or ``METHOD:ALLOCATION``.
        ours: What the others are compared with, likewise.
        samples: Resamples of every interval.
        seed: Of the resamples; those of a task are the same whatever other tasks there are.

    Raises:
        InvalidInputError: ``reference`` or ``ours`` is not there.
    """
    yardstick, own = outcomes.variant(reference), outcomes.variant(ours)
    tasks: dict[str, TaskSummary] = {}
    totals: dict[Point, Parts] = {}
    tallies: dict[Point, list[tuple[int, int]]] = {}
    for name, rows in outcomes.rows.items():
        table = _Table(rows, Resampler([example for example, _ in rows], samples, [seed, *name.encode()]))
        parts = {point: table.parts(point, yardstick, own) for point in table.points}
        counts = {point: table.counts(point, own) for point in table.points}
        figures = {point: _figures(parts[point], *counts[point]) for point in table.points}
        tasks[name] = TaskSummary(outcomes.tasks[name], table.resampler.examples, len(rows), figures)
        if not tasks[name].within_reach:
            continue
        for point in table.points:
            tallies.setdefault(point, []).append(counts[point])
            before, new = totals.get(point), parts[point]
            # What a task lacks has no mean over all tasks.
            totals[point] = new if before is None else {key: before[key] + new[key] for key in before if key in new}
    judged = sum(task.within_reach for task in tasks.values())
    overall = {}
    for point, total in totals.items():
        if len(tallies[point]) == judged:
            questions, pairs = map(sum, zip(*tallies[point], strict=True))
            overall[point] = _figures({key: part / judged for key, part in total.items()}, questions, pairs)
    return Summary(yardstick, own, samples, tasks, overall)


class _Table:
    """One task's outcomes as columns: a point's values, NaN where it has no answer.

    Args:
        rows: Outcomes by question and point.
        resampler: Of the questions' examples, in the same order.
    """

    def __init__(self, rows: Mapping[Asked, Mapping[Point, Outcome]], resampler: Resampler) -> None:
        self.resampler = resampler
        self.points = list(dict.fromkeys(point for row in rows.values() for point in row))
        nothing = Outcome(math.nan, math.nan, math.nan)
        self._columns = {
            point: {
                name: np.array([getattr(row.get(point, nothing), name) for row in rows.values()])  # [U]
                for name in ("score", "nll", "kept")
            }
            for point in self.points
        }

    def parts(self, point: Point, reference: Variant, ours: Variant) -> Parts:
        """The means that a point's figures are made of; those left out that have nothing to be taken from."""
        own = self._columns[point]
        parts = {name: self.resampler.mean(own[name]) for name in ("score", "nll", "kept")}
        parts |= self._shared("full", own["score"], self._columns[FULL]["score"])
        beside = self._columns.get(Point(reference, point.ratio))
        if beside is not None:
            parts |= self._shared("reference", own["score"], beside["score"])
            parts["nll_over_reference"] = self.resampler.mean(own["nll"] - beside["nll"])
        first = self._columns.get(Point(ours, point.ratio))
        if first is not None and point.variant != ours:
            parts["lead"] = self.resampler.mean(first["score"] - own["score"])
            parts["lead_nll"] = self.resampler.mean(first["nll"] - own["nll"])
        return {name: part for name, part in parts.items() if part is not None}

    def _shared(self, name: str, own: Floats, other: Floats) -> dict[str, Sampled | None]:
        """Both means of the questions that both answered."""
        both = np.where(np.isnan(own), np.nan, other)
        return {
            f"beside_{name}": self.resampler.mean(np.where(np.isnan(other), np.nan, own)),
            name: self.resampler.mean(both),
        }

    def counts(self, point: Point, ours: Variant) -> tuple[int, int]:
        """Questions that a point answered, and that ours answered too."""
        answered = ~np.isnan(self._columns[point]["score"])
        first = self._columns.get(Point(ours, point.ratio))
        both = 0 if first is None else np.count_nonzero(answered & ~np.isnan(first["score"]))
        return int(np.count_nonzero(answered)), int(both)


def _figures(parts: Parts, questions: int, pairs: int) -> Figures:
    def estimate(name: str) -> Estimate | None:
        return parts[name].estimate() if name in parts else None

    def recovery(of: str, least: float) -> Estimate | None:
        if of not in parts or parts[of].value < least or parts[of].value == 0:
            return None
        return (parts[f"beside_{of}"] / parts[of]).estimate()

    return Figures(
        questions=questions,
        score=parts["score"].estimate(),
        nll=estimate("nll"),
        kept=parts["kept"].value,
        of_full=recovery("full", 0.0),
        of_reference=recovery("reference", MEANINGFUL),
        reference_score=parts["reference"].value if "reference" in parts else None,
        nll_over_reference=estimate("nll_over_reference"),
        lead=estimate("lead"),
        lead_nll=estimate("lead_nll"),
        pairs=pairs,
    )
