"""The report in Markdown: the means, ours compared with each other method, each task, and how it was measured."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .cells import WHOLE, Cell, Variant
from .outcomes import Outcomes
from .statistics import LEAST_CONTEXTS, Estimate
from .summary import (
    DEFAULT_OURS,
    DEFAULT_REFERENCE,
    MEANINGFUL,
    WITHIN_REACH,
    Figures,
    Summary,
    TaskSummary,
    common_ratios,
)

#: The text of a table's entry, made of a cell's figures.
Show = Callable[[Figures], str]


def markdown(outcomes: Outcomes, summary: Summary, pictures: Sequence[Path] = ()) -> str:
    """The whole report.

    Args:
        outcomes: The outcomes that were summarized.
        summary: From `summarize`.
        pictures: Plots to show, in the folder of the report.
    """
    parts = [f"# Scores with a pruned KV cache: {outcomes.headers[0]['target']}", _what_was_asked(outcomes, summary)]
    parts += [f"![{picture.stem.replace('_', ' ')}]({picture.name})" for picture in pictures]
    parts += _overall(summary) if summary.overall else []
    parts += _by_task(summary)
    parts += _unequal(outcomes, summary)
    parts += ["## How it was measured", _facts(outcomes, summary)]
    return "\n\n".join(parts) + "\n"


def _what_was_asked(outcomes: Outcomes, summary: Summary) -> str:
    header, tasks = outcomes.headers[0], summary.tasks.values()
    examples = sum(task.examples for task in tasks)
    # Contexts from a file have any length.
    length = "" if header["tokens"] is None else f" of at most {header['tokens']} tokens"
    lines = [
        f"{_count(len(tasks), 'task')} with {_count(sum(task.questions for task in tasks), 'question')} about "
        f"{_count(examples, 'context')}{length}. "
        + (
            "The methods **know the question** when they prune the cache."
            if header["query_aware"]
            else "The methods prune the cache before they know any question."
        )
    ]
    beyond = [f"{name} ({task.full.score.value:.2f})" for name, task in summary.tasks.items() if not task.within_reach]
    if beyond:
        lines.append(
            f"The full cache scores under {WITHIN_REACH} on these tasks, so they are left out of all means: "
            f"{', '.join(beyond)}." + ("" if summary.overall else " No task is left, so there are no means.")
        )
    if summary.reference is None:
        lines.append(
            f"The files have no rows of {DEFAULT_REFERENCE}, so no recovery relative to it is shown. To choose another "
            "method, pass --reference."
        )
    if summary.ours is None:
        lines.append(
            f"The files have no rows of {DEFAULT_OURS}, so it is not compared with the other methods. To compare "
            "another method with them, pass --ours."
        )
    return "\n".join(lines)


def _overall(summary: Summary) -> list[str]:
    reference, ours, figures = summary.reference, summary.ours, summary.overall
    parts = [
        "## Score",
        f"The mean score over {_count(len(summary.judged), 'task')} with equal weights, and its 95 % interval. Each "
        "column is a retention ratio: the share of the context's KV pairs that is kept.",
        _table(summary, figures, _score, full=figures[WHOLE], last=("share of the full cache's bytes", _kept(summary))),
        "The bytes include the KV pairs of the chat template, which are all kept.",
        *_answered(summary),
    ]
    if reference is not None:
        parts += [
            f"## Recovery relative to {reference}",
            f"The score divided by the score of {reference} at the same ratio. {_where_not_meaningful(reference)}",
            _table(summary, figures, _recovery(reference), without=reference),
        ]
    parts += [
        "## Recovery relative to the full cache",
        "The score divided by the score of the full cache.",
        _table(summary, figures, lambda found: _span(found.of_full)),
    ]
    return parts if ours is None else parts + _leads(summary, ours)


def _leads(summary: Summary, ours: Variant) -> list[str]:
    figures = summary.overall
    return [
        f"## {ours} compared with the other methods",
        f"The score of {ours} minus the score of the other method at the same ratio, in points (hundredths), over the "
        "questions that both answered. A difference is **bold** if its interval excludes zero.",
        _table(summary, figures, lambda found: _signed(found.lead, 100, ".1f"), without=ours, pairs=True),
        "The same difference in the negative log-likelihood of the right answers, in nats per token. Below zero, the "
        f"right answers are more likely with {ours}.",
        _table(summary, figures, lambda found: _signed(found.lead_nll, 1, ".3f"), without=ours, pairs=True),
    ]


def _answered(summary: Summary) -> list[str]:
    """The text under the table of means: methods with fewer answers, and means over the questions that all answered."""
    total = sum(summary.tasks[name].questions for name in summary.judged)
    fewer: dict[str, list[str]] = {}
    for variant in (WHOLE.variant, *summary.variants()):
        numbers = [found.questions for cell, found in summary.overall.items() if cell.variant == variant]
        if numbers and min(numbers) < total:
            fewer.setdefault(_range(numbers), []).append(str(variant))
    parts = []
    if fewer:
        who = "; ".join(f"{', '.join(names)} answered {numbers}" for numbers, names in fewer.items())
        parts.append(
            f"Some rows are means over fewer than the {_count(total, 'question')}: {who}. The other methods answered "
            "all questions."
        )
    if summary.shared:
        shared = summary.shared[WHOLE].questions
        parts += [
            f"The means over the {_count(shared, 'question')} in {_count(len(summary.shared_tasks), 'task')} that all "
            "methods answered, at the ratios that all methods have:",
            _table(summary, summary.shared, _score, full=summary.shared[WHOLE], common=True),
        ]
    return parts


def _by_task(summary: Summary) -> list[str]:
    parts = ["## By task"]
    if summary.reference is not None and summary.ours is not None:
        parts += _recovery_by_task(summary, summary.reference, summary.ours)
    for name, task in summary.tasks.items():
        parts += [f"### {name}", _about(task), _table(summary, task.figures, _score, full=task.full)]
    return parts


def _recovery_by_task(summary: Summary, reference: Variant, ours: Variant) -> list[str]:
    ratios = summary.ratios()
    rows = []
    for name, task in summary.tasks.items():
        entries = [_entry(task.figures, ours.at(ratio), _recovery(reference)) for ratio in ratios]
        title = name if task.within_reach else f"{name} (not in the means)"
        rows.append([title, f"{task.full.score.value:.2f}", *entries])
    return [
        f"The score of the full cache, and at each ratio the score of {ours} divided by the score of {reference}. "
        f"{_where_not_meaningful(reference)}",
        _grid(["task", "full", *map(_ratio, ratios)], rows),
    ]


def _about(task: TaskSummary) -> str:
    about = f"{_count(task.questions, 'question')} about {_count(task.examples, 'context')}; metric {task.metric}."
    if task.examples < LEAST_CONTEXTS:
        about += f" There are no intervals, because there are fewer than {LEAST_CONTEXTS} contexts."
    if not task.within_reach:
        about += f" The full cache scores only {task.full.score.value:.2f}, so the means leave this task out."
    return about


def _unequal(outcomes: Outcomes, summary: Summary) -> list[str]:
    """The section that names cells with fewer answers than others; empty if there are none."""
    alike: dict[str, list[Cell]] = {}
    for cell in (WHOLE, *summary.cells()):
        lacks = []
        for name, task in summary.tasks.items():
            found = task.figures.get(cell)
            if found is None or found.questions < task.questions:
                lacks.append(f"{0 if found is None else found.questions} of {task.questions} questions of {name}")
        if lacks:
            alike.setdefault(", ".join(lacks), []).append(cell)
    lines = [f"- {_cells(cells)}: answered {lacks}" for lacks, cells in alike.items()]
    answers = [found for asked in outcomes.rows.values() for row in asked.values() for found in row.values()]
    without = sum(math.isnan(found.nll) for found in answers)
    if without:
        lines.append(f"- {_count(without, 'answer')} without a log-likelihood")
    if not lines:
        return []
    text = (
        "A score is a mean over the questions that the method answered. A comparison is over the questions that both "
        "methods answered. A method that answered no question of a task has no mean over the tasks. These answers are "
        "missing or incomplete:"
    )
    return ["## Missing answers", text, "\n".join(lines)]


def _cells(cells: Sequence[Cell]) -> str:
    """Cells as text, such as ``snapkv (uniform) at 0.1, 0.2; random (uniform) at 0.1``."""
    ratios: dict[Variant, list[str]] = {}
    for cell in cells:
        ratios.setdefault(cell.variant, []).append(f"{cell.ratio:g}")
    return "; ".join(f"{variant} at {', '.join(own)}" for variant, own in ratios.items())


def _facts(outcomes: Outcomes, summary: Summary) -> str:
    runs = [run for header in outcomes.headers for run in (header, *header.get("later", []))]

    def of(name: str) -> str:
        return "; ".join(dict.fromkeys(_plain(run[name]) for run in runs if run.get(name)))

    facts = {
        "target": of("target"),
        "target weights": of("target_weights"),
        "mapper": of("mapper"),
        "dtype": of("dtype"),
        "seed": _plain(outcomes.headers[0]["seed"]),
        "metrics": _plain(outcomes.tasks),
        "versions": of("versions"),
        "hardware": of("hardware"),
        "commit": of("commit"),
        "intervals": f"95 %, from {summary.samples:,} bootstrap resamples of each task's contexts, each with all of "
        "its questions. If all contexts score alike, the interval is a single point. A task with fewer than "
        f"{LEAST_CONTEXTS} contexts has no interval.",
    }
    rows = [[name, value] for name, value in facts.items() if value]
    commands = dict.fromkeys(_command(run["command"]) for run in runs if run.get("command"))
    table = _grid(["", ""], rows)
    return "\n\n".join([table, "```bash\n" + "\n".join(commands) + "\n```"] if commands else [table])


def _command(command: str | list[str]) -> str:
    return command if isinstance(command, str) else shlex.join(command)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return str(value)


def _where_not_meaningful(reference: Variant) -> str:
    return (
        f"If {reference} itself scores under {MEANINGFUL}, this quotient says little. The table then shows the score "
        f"of {reference}, and by how much the negative log-likelihood (nll) of the right answers is higher than with "
        f"{reference}, in nats per token."
    )


def _kept(summary: Summary) -> Callable[[float], str]:
    def show(ratio: float) -> str:
        kept = [found.kept for cell, found in summary.overall.items() if cell.ratio == ratio]
        ends = dict.fromkeys(f"{end:.2f}" for end in (min(kept), max(kept))) if kept else {}
        return "–".join(ends)

    return show


def _table(
    summary: Summary,
    figures: dict[Cell, Figures],
    show: Show,
    *,
    full: Figures | None = None,
    without: Variant | None = None,
    pairs: bool = False,
    common: bool = False,
    last: tuple[str, Callable[[float], str]] | None = None,
) -> str:
    """A table with a row for each variant and a column for each ratio.

    Args:
        summary: Determines the variants and ratios, and their order.
        figures: The figures to show, by cell.
        show: Makes the text of an entry.
        full: The figures of the full cache, for a row and a column of its own.
        without: A variant to leave out.
        pairs: Add a last column with the number of questions that both answered.
        common: Show only the ratios that all variants in ``figures`` have.
        last: The name of a last row, and a function that makes its entry for a ratio.
    """
    ratios = [ratio for ratio in summary.ratios() if not common or ratio in common_ratios(figures)]
    whole = [] if full is None else ["all"]
    heading = ["method", "allocation", *whole, *map(_ratio, ratios), *(["questions in common"] if pairs else [])]
    rows = [] if full is None else [[WHOLE.method, "", show(full), *[""] * len(ratios)]]
    for variant in summary.variants():
        if variant == without:
            continue
        name = f"**{variant.method}**" if variant == summary.ours else variant.method
        cells = [variant.at(ratio) for ratio in ratios]
        entries = [_entry(figures, cell, show) for cell in cells]
        if pairs:
            numbers = [figures[cell].pairs for cell in cells if cell in figures]
            entries.append(_range(numbers) if numbers else "")
        rows.append([name, variant.allocation or "", *[""] * len(whole), *entries])
    if last is not None:
        rows.append([last[0], "", *["1.00"] * len(whole), *map(last[1], ratios)])
    return _grid(heading, rows)


def _entry(figures: dict[Cell, Figures], cell: Cell, show: Show) -> str:
    return show(figures[cell]) if cell in figures else "–"


def _grid(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(entries)} |" for entries in rows)])


def _range(numbers: Sequence[int]) -> str:
    return "–".join(dict.fromkeys(str(end) for end in (min(numbers), max(numbers))))


def _score(found: Figures) -> str:
    return _span(found.score)


def _recovery(reference: Variant) -> Show:
    def show(found: Figures) -> str:
        if found.of_reference is not None:
            return _span(found.of_reference)
        if found.reference_score is None:
            return "–"
        difference = _signed(found.nll_over_reference, 1, ".2f", bold=False)
        return f"{reference.method} {found.reference_score:.2f}: nll {difference}"

    return show


def _span(estimate: Estimate | None) -> str:
    """A figure and its interval, such as ``0.93 (0.90–0.96)``."""
    if estimate is None:
        return "–"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} ({estimate.low:.2f}–{estimate.high:.2f})"


def _signed(estimate: Estimate | None, scale: float, style: str, bold: bool = True) -> str:
    """A difference and its interval, such as ``+4.8 (+0.0 to +10.7)``."""
    if estimate is None:
        return "–"
    text = format(scale * estimate.value, f"+{style}")
    if estimate.low is not None and estimate.high is not None:
        text += f" ({scale * estimate.low:+{style}} to {scale * estimate.high:+{style}})"
    return f"**{text}**" if bold and estimate.excludes_zero else text


def _ratio(value: float) -> str:
    return format(value, "g")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
