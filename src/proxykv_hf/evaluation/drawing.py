"""How plots look: 8 inches and 1,600 pixels wide, to be readable at half that size. They need matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Okabe and Ito's colours, which colour-blind readers can tell apart (jfly.uni-koeln.de/color, 2008), and three more.
OURS, REFERENCE, GREY = "#0072B2", "#000000", "#8A8A8A"
OTHERS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F", "#B8A800")
#: matplotlib's settings.
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
}
_DPI = 200


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path, title: str) -> None:
    """Write a PNG with a title at its top left."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5)
    figure.savefig(path, format="png", dpi=_DPI)


def spread(wanted: Sequence[float], gap: float, lowest: float) -> list[float]:
    """The places of labels, moved as little as possible to be ``gap`` apart and not below ``lowest``.

    The labels keep their order. Labels that would overlap form a block around the mean of their wanted places.
    """
    order = sorted(range(len(wanted)), key=lambda label: wanted[label])
    blocks: list[list[int]] = []

    def start(block: list[int]) -> float:
        middle = sum(wanted[label] for label in block) / len(block)
        return max(lowest, middle - gap * (len(block) - 1) / 2)

    for label in order:
        blocks.append([label])
        while len(blocks) > 1 and start(blocks[-2]) + gap * len(blocks[-2]) > start(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    places = {label: start(block) + gap * i for block in blocks for i, label in enumerate(block)}
    return [places[label] for label in range(len(wanted))]
