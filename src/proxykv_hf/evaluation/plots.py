"""The report's plots; they need matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .cells import WHOLE, Variant
from .drawing import GREY, OTHERS, OURS, REFERENCE, STYLE, new_figure, save, spread
from .statistics import LEAST_CONTEXTS
from .summary import Figures, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ALLOCATIONS = {"global": "one threshold over all heads", "uniform": "the same number in every head"}


def plot_scores(summary: Summary, path: Path, title: str) -> bool:
    """Write a PNG of the mean score against the share of KV pairs kept, with one panel for each allocation.

    Our method and the reference are in every panel.

    Returns: False if there is nothing to draw: no means over tasks, or no method that prunes.
    """
    if not summary.overall or not summary.cells():
        return False
    import matplotlib as mpl

    allocations = list(dict.fromkeys(variant.allocation for variant in summary.variants()))
    with mpl.rc_context(STYLE):
        figure = new_figure(8, 4.4)
        panels = figure.subplots(1, len(allocations), sharey=True, squeeze=False)[0]
        for axes, allocation in zip(panels, allocations, strict=True):
            _draw_scores(axes, summary, allocation)
            if len(allocations) > 1:
                axes.set_title(f"{allocation}: {_ALLOCATIONS.get(str(allocation), '')}", loc="left", color=GREY)
        panels[0].set_ylabel("mean score" + (f" over {len(summary.judged)} tasks" if len(summary.judged) > 1 else ""))
        save(figure, path, title)
    return True


def _draw_scores(axes: Axes, summary: Summary, allocation: str | None) -> None:
    both = (summary.ours, summary.reference)
    variants = [variant for variant in summary.variants() if variant.allocation == allocation or variant in both]
    ends: list[tuple[float, float, str, str]] = []  # of each curve: last ratio, last score, label, colour
    for variant in variants:
        ratios = [ratio for ratio in summary.ratios() if variant.at(ratio) in summary.overall]
        if not ratios:
            continue
        found = [summary.overall[variant.at(ratio)].score for ratio in ratios]
        colour, first = _colour(variant, summary), variant in both
        values = [estimate.value for estimate in found]
        width, size, alpha = (2.2, 4, 0.16) if first else (1.3, 3, 0.08)
        axes.plot(ratios, values, color=colour, linewidth=width, marker="o", markersize=size)
        low = [estimate.value if estimate.low is None else estimate.low for estimate in found]
        high = [estimate.value if estimate.high is None else estimate.high for estimate in found]
        axes.fill_between(ratios, low, high, color=colour, alpha=alpha, linewidth=0)
        name = variant.method if variant.allocation == allocation else str(variant)
        ends.append((ratios[-1], values[-1], name, colour))
    shares, full = summary.ratios(), summary.overall[WHOLE].score.value
    axes.axhline(full, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(shares[0], full + 0.012, f"full cache {full:.2f}", color=GREY, va="bottom")
    axes.set_xscale("log")
    axes.set_xlim(shares[0] * 1.08, shares[-1] / 1.08)  # the smallest ratio is on the right, where methods differ most
    axes.set_xticks(shares, [f"{ratio:g}" for ratio in shares])
    axes.set_xticks([], minor=True)
    axes.set(ylim=(0, 1.06), xlabel="share of KV pairs kept")
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.6)
    axes.set_axisbelow(True)
    ends.reverse()  # where two curves end at about the same score, the better one gets the higher label
    places = spread([round(20 * value) / 20 for _, value, _, _ in ends], 0.056, 0.0)
    for (ratio, value, name, colour), place in zip(ends, places, strict=True):
        axes.annotate(
            name,
            xy=(ratio, value),
            xytext=(1.07, place),
            xycoords="data",
            textcoords=("axes fraction", "data"),
            color=colour,
            va="center",
            fontweight="bold" if colour == OURS else "normal",
            # Dotted, so that the line from a curve that ends early does not look like a part of the curve.
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.8,
                "linestyle": (0, (1, 2)),
                "shrinkA": 0,
                "relpos": (0, 0.5),
            },
        )


def plot_recovery(summary: Summary, path: Path, title: str) -> bool:
    """Write a PNG of the share of the reference's score that ours recovers, by task and ratio; other methods in grey.

    Returns: False if there is nothing to draw: ours or the reference is missing, or the reference scores too low in all
        tasks within reach.
    """
    reference, ours = summary.reference, summary.ours
    if reference is None or ours is None:
        return False
    ratios, tasks = summary.ratios(), summary.judged
    rows = [("all tasks", summary.overall), *((name, summary.tasks[name].figures) for name in tasks)]
    drawn = [figures.get(ours.at(ratio)) for _, figures in rows for ratio in ratios]
    highest = [found.of_reference.high or found.of_reference.value for found in drawn if found and found.of_reference]
    if not highest:
        return False
    import matplotlib as mpl

    others = [variant for variant in summary.variants() if variant not in (ours, reference)]
    with mpl.rc_context(STYLE):
        figure = new_figure(8, 1.5 + 0.27 * len(rows))
        panels = figure.subplots(1, len(ratios), sharey=True, sharex=True, squeeze=False)[0]
        for axes, ratio in zip(panels, ratios, strict=True):
            axes.axvline(1, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
            for place, (_, figures) in enumerate(rows):
                beside = [figures.get(variant.at(ratio)) for variant in others]
                _draw_recovery(axes, place, figures.get(ours.at(ratio)), beside, reference.method)
            axes.set_title(f"{ratio:g} kept", loc="left")
            axes.tick_params(axis="y", length=0)
            axes.spines["left"].set_visible(False)
        panels[0].set_yticks(range(len(rows)), [name for name, _ in rows])
        panels[0].get_yticklabels()[0].set_fontweight("bold")
        panels[0].set(ylim=(len(rows) - 0.5, -0.6), xlim=(-0.03, min(2.0, max(1.1, 1.06 * max(highest)))))
        panels[0].set_xticks([0, 0.5, 1])
        figure.supxlabel(
            f"blue: {ours.method}'s score divided by {reference.method}'s, with a 95 % interval if there are at least "
            f"{LEAST_CONTEXTS} contexts; grey: the same for other methods;\n"
            f"text: {reference.method}'s own score, if it is too low to divide by",
            fontsize=8,
            color=GREY,
        )
        save(figure, path, f"{ours.method} relative to {reference.method}: {title}")
    return True


def _draw_recovery(
    axes: Axes, place: int, own: Figures | None, others: Sequence[Figures | None], reference: str
) -> None:
    for other in others:
        if other is not None and other.of_reference is not None:
            share = other.of_reference.value
            axes.plot(share, place, "|", color="#B0B0B0", markersize=7, markeredgewidth=1.2, zorder=1)
    if own is None or own.reference_score is None:
        return
    if (found := own.of_reference) is None:
        text = f"{reference} {own.reference_score:.2f}"
        axes.text(0.5, place, text, color=GREY, va="center", ha="center", fontsize=7.5, style="italic")
        return
    if found.low is not None and found.high is not None:
        axes.plot([found.low, found.high], [place, place], color=OURS, linewidth=1.6, zorder=2)
    axes.plot(found.value, place, "o", color=OURS, markersize=6 if place == 0 else 4.5, zorder=3)


def _colour(variant: Variant, summary: Summary) -> str:
    """The colour of the variant's method; all allocations of a method have the same colour."""
    both = ((summary.reference, REFERENCE), (summary.ours, OURS))
    named = {known.method: colour for known, colour in both if known is not None}
    others = sorted({other.method for other in summary.variants()} - set(named))
    return named.get(variant.method) or OTHERS[others.index(variant.method) % len(OTHERS)]
