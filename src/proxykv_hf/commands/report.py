"""``proxykv report``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from ..errors import InvalidInputError
from ..evaluation.outcomes import Outcomes, read_outcomes
from ..evaluation.plots import plot_recovery, plot_scores
from ..evaluation.summary import DEFAULT_OURS, DEFAULT_REFERENCE, Summary, summarize
from ..evaluation.table import markdown
from ..files import write_whole


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="report the results of an evaluation: tables, intervals, plots",
        description="From files that `proxykv evaluate` wrote: scores with 95 % intervals, the share of KVzip's score "
        "and of the full cache's score that each method recovers, and paired differences to every other method.",
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="JSON lines of one experiment")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where to write report.md, report.json and, if matplotlib is installed, scores.png and recovery.png "
        "(default: print Markdown to stdout)",
    )
    parser.add_argument(
        "--reference",
        metavar="METHOD[:ALLOCATION]",
        help=f"the method that recovery is relative to (default: {DEFAULT_REFERENCE}, if the files have it; global, "
        "if it has two allocations)",
    )
    parser.add_argument(
        "--ours",
        metavar="METHOD[:ALLOCATION]",
        help=f"the method that the others are compared with (default: {DEFAULT_OURS}, if the files have it)",
    )
    parser.add_argument(
        "--tasks", nargs="+", metavar="TASK", help="report only these tasks (default: all in the files)"
    )
    parser.add_argument(
        "--samples", type=int, default=10_000, help="bootstrap resamples for each interval (default: 10000)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    if arguments.samples < 1:
        raise InvalidInputError(f"--samples: expected at least 1, got {arguments.samples}")
    outcomes = read_outcomes(arguments.files)
    if arguments.tasks is not None:
        outcomes = outcomes.of_tasks(arguments.tasks)
    summary = summarize(outcomes, arguments.reference, arguments.ours, arguments.samples)
    if arguments.out is None:
        print(markdown(outcomes, summary), end="")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    plots = _plots(outcomes, summary, arguments.out)
    figures = {"files": outcomes.files, "headers": outcomes.headers} | summary.to_dict()
    write_whole(arguments.out / "report.json", (json.dumps(figures, indent=1, ensure_ascii=False) + "\n").encode())
    write_whole(arguments.out / "report.md", markdown(outcomes, summary, plots).encode())
    print(arguments.out / "report.md")


def _plots(outcomes: Outcomes, summary: Summary, folder: Path) -> list[Path]:
    """Draw the plots that can be drawn, and return their files."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots without matplotlib: pip install 'proxykv-hf[plot]'", file=sys.stderr)
        return []
    header = outcomes.headers[0]
    length = "" if header["tokens"] is None else f"contexts of {header['tokens']} tokens, "
    title = f"{header['target']}, {length}{header['dtype']}"
    made = []
    for name, plot in (("scores.png", plot_scores), ("recovery.png", plot_recovery)):
        if plot(summary, folder / name, title):
            made.append(folder / name)
    return made
