"""Summaries of a benchmark's rows: medians and ratios, as JSON, as Markdown and as a plot."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidInputError
from ..files import write_whole

#: The columns of the Markdown table: heading, key of the summary, number format.
COLUMNS = (
    ("method", "method", ""),
    ("seconds until pruned", "seconds", ".3f"),
    ("over kvzip", "seconds_over_kvzip", ".2f"),
    ("over full", "seconds_over_full", ".2f"),
    ("tokens decoded per second", "tokens_per_second", ".1f"),
    ("over full", "tokens_per_second_over_full", ".2f"),
    ("KV bytes kept, over full", "kv_kept_over_full", ".3f"),
    ("KV bytes at peak, over full", "kv_peak_over_full", ".3f"),
    ("memory peak, over full", "memory_peak_over_full", ".2f"),
    ("scoring, over full's prefill", "scoring_over_full_prefill", ".3f"),
    ("mapper's share", "mapper_share", ".3f"),
)


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the repeats, and ratios of medians, for each length and method.

    Args:
        rows: From `measure.runs`.

    Returns: a dict for each length and method, with the keys of ``COLUMNS``, ``length``, ``runs`` and
        ``seconds_range``. A ratio is None if there is nothing to compare with. ``scoring_over_full_prefill`` is the
        time of proxy and mapper, over the prefill of ``full``. ``mapper_share`` is the mapper's share of the time
        until the cache is pruned.
    """
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["length"], row["method"]), []).append(row)

    def median(length: int, method: str, key: str) -> float | None:
        values = [row[key] for row in groups.get((length, method), [])]
        return None if not values or None in values else statistics.median(values)

    summary = []
    for (length, method), runs in groups.items():
        seconds = [row["seconds"] for row in runs]
        middle = statistics.median(seconds)
        speed = median(length, method, "tokens_per_second")
        full_prefill, full_bytes = median(length, "full", "seconds"), median(length, "full", "bytes_full")
        proxied = [row for row in runs if "mapper" in row["phases"]]  # other scorers have no such phases
        scoring = [row["phases"]["proxy"] + row["phases"]["mapper"] for row in proxied]
        mapper = [row["phases"]["mapper"] / row["seconds"] for row in proxied]
        summary.append(
            {
                "length": length,
                "method": method,
                "runs": len(runs),
                "seconds": middle,
                "seconds_range": [min(seconds), max(seconds)],
                "seconds_over_kvzip": _ratio(middle, median(length, "kvzip", "seconds")),
                "seconds_over_full": _ratio(middle, full_prefill),
                "tokens_per_second": speed,
                "tokens_per_second_over_full": _ratio(speed, median(length, "full", "tokens_per_second")),
                "kv_kept_over_full": _ratio(median(length, method, "bytes_kept"), full_bytes),
                "kv_peak_over_full": _ratio(median(length, method, "bytes_peak"), full_bytes),
                "memory_peak_over_full": _ratio(
                    median(length, method, "memory_peak"), median(length, "full", "memory_peak")
                ),
                "scoring_over_full_prefill": _ratio(statistics.median(scoring) if scoring else None, full_prefill),
                "mapper_share": statistics.median(mapper) if mapper else None,
            }
        )
    return sorted(summary, key=lambda entry: entry["length"])


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def markdown(summary: Sequence[dict[str, Any]]) -> str:
    """A table for each length, fastest prefill first."""
    parts = []
    for length in sorted({entry["length"] for entry in summary}):
        entries = sorted((e for e in summary if e["length"] == length), key=lambda entry: entry["seconds"])
        lines = [f"{length} tokens, medians of {max(entry['runs'] for entry in entries)}:", ""]
        lines.append(f"| {' | '.join(heading for heading, _, _ in COLUMNS)} |")
        lines.append("|---" * len(COLUMNS) + "|")
        for entry in entries:
            cells = ("" if entry[key] is None else format(entry[key], style) for _, key, style in COLUMNS)
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def check_writable(path: Path) -> None:
    """Check that a file can be written, before there is anything to write.

    Raises:
        InvalidInputError: The file's folder is missing or not writable, or ``path`` is itself a folder.
    """
    if path.is_dir():
        raise InvalidInputError(f"expected a file to write, but {path} is a folder")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InvalidInputError(f"expected a folder that can be written for {path}: {error}") from error


def write_results(path: Path, header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write header, rows and summary to one JSON file, atomically."""

    def lines(entries: Sequence[dict[str, Any]]) -> str:
        return "[\n" + ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries) + "\n]"

    head = json.dumps(header, ensure_ascii=False)
    text = f'{{"header": {head},\n"rows": {lines(rows)},\n"summary": {lines(summarize(rows))}}}\n'
    write_whole(path, text.encode())


def plot(summary: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw seconds until the cache is pruned, and tokens decoded per second, against the length; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = (("seconds", "prefill until pruned, seconds"), ("tokens_per_second", "decode, tokens a second"))
    for axes, (key, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for method in dict.fromkeys(entry["method"] for entry in summary):
            points = [(entry["length"], entry[key]) for entry in summary if entry["method"] == method]
            axes.plot(*zip(*points, strict=True), marker="o", label=method)
        lengths = sorted({entry["length"] for entry in summary})
        axes.set(xlabel="prompt, tokens", ylabel=label, ylim=(0, None), xticks=lengths)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=150)
