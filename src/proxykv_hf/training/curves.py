"""The plot of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .checkpoints import Epoch
from .metrics import RATIOS


def plot(history: Sequence[Epoch], baseline: dict[str, float], path: Path, title: str) -> None:
    """Draw the loss and its terms, the agreement within heads and the agreement over all heads, by epoch, as a PNG.

    This needs matplotlib.

    Args:
        history: From `loop.train`.
        baseline: The metrics of the head prior, drawn as dashed lines.
        path: The file to write.
        title: The title of the figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    losses, *panels = figure.subplots(1, 3)
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.15), "ncols": 3}
    epochs = [entry["epoch"] for entry in history]
    losses.plot(epochs, [entry["loss"] for entry in history], color="black", label="sum, weighted")
    for term in history[0]["terms"]:
        losses.plot(epochs, [entry["terms"][term] for entry in history], label=term)
    losses.set(xlabel="epoch", ylabel="loss in training", ylim=(0, None))
    losses.legend(**below)
    for axes, (key, label) in zip(panels, (("head", "within each head"), ("global", "over all heads")), strict=True):
        for ratio in RATIOS:
            name = f"{key}@{ratio}"
            (line,) = axes.plot(epochs, [entry["metrics"][name] for entry in history], label=f"{ratio} kept")
            axes.axhline(baseline[name], color=line.get_color(), linestyle="--", linewidth=0.8)
        axes.set(xlabel="epoch", ylabel=f"agreement {label}", ylim=(0, 1))
        axes.legend(title="dashed: head prior", **below)
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120)
