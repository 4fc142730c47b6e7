"""Plots what is kept of one text: layers and heads against tokens; it needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .drawing import GREY, OTHERS, OURS, REFERENCE, STYLE, new_figure, save
from .kept import Kept, peaks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The largest number of words above a strip, and of letters in a word that is not cut; more would overlap.
WORDS, LETTERS = 8, 11
#: About the width of a panel.
PIXELS = 1400
_MARK = OTHERS[0]


def plot_kept(kept: Kept, path: Path, title: str) -> None:
    """Write a PNG that shows, for each scorer, what share of the heads keeps each token, and what each head keeps.

    Args:
        kept: From `find_kept`.
        path: The file to write.
        title: The title above all panels.
    """
    import matplotlib as mpl

    names = list(kept.masks)
    with mpl.rc_context(STYLE):
        figure = new_figure(8, 0.6 + 3.0 * len(names))
        panels = figure.subplots(2 * len(names), 1, sharex=True, height_ratios=[1, 2.6] * len(names))
        for index, name in enumerate(names):
            colour = REFERENCE if index == 0 else OURS if index == 1 else OTHERS[index % len(OTHERS)]
            strip, heat = panels[2 * index], panels[2 * index + 1]
            _draw_strip(strip, kept, name, colour)
            _draw_heads(heat, kept, name, colour)
            heading = f"{name}: {kept.masks[name].float().mean():.2f} of {kept.masks[name].numel():,} KV pairs"
            if index > 0:
                heading += f", {100 * kept.overlap(name, names[0]):.0f} % of them also {names[0]}'s"
            strip.set_title(heading, loc="left", color=colour, fontweight="bold", pad=24)
        panels[-1].set_xlabel("token of the text" + ("; orange: marked" if kept.marks else ""))
        save(figure, path, title)


def _draw_strip(axes: Axes, kept: Kept, name: str, colour: str) -> None:
    shares = kept.heads_keeping(name)
    tokens = len(shares)
    axes.fill_between(range(tokens), shares.tolist(), step="mid", color=colour, alpha=0.75, linewidth=0)
    for start, stop in kept.marks:
        axes.axvspan(start - 0.5, stop - 0.5, color=_MARK, alpha=0.25, linewidth=0)
    for token, word in peaks(shares, kept.words, WORDS, -(-tokens // WORDS)):
        text = word if len(word) <= LETTERS else word[: LETTERS - 1] + "…"
        half = 0.0039 * tokens * len(text)  # half the width of the word, to keep it inside the panel
        axes.annotate(
            text,
            xy=(token, float(shares[token])),
            xytext=(min(max(token, half), tokens - half), 1.18),
            ha="center",
            fontsize=7.5,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 1},
        )
    axes.set(ylim=(0, 1), yticks=[0, 1], xlim=(-0.5, tokens - 0.5), ylabel="heads\nkeeping")
    axes.tick_params(axis="x", length=0)


def _draw_heads(axes: Axes, kept: Kept, name: str, colour: str) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    layers, heads, tokens = kept.masks[name].shape
    # Where there are more tokens than pixels, antialiasing shows the density of the kept tokens.
    axes.imshow(
        kept.masks[name].reshape(layers * heads, tokens).float().numpy(),
        cmap=LinearSegmentedColormap.from_list(name, ["#FFFFFF", colour]),
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest" if tokens <= PIXELS else "antialiased",
        extent=(-0.5, tokens - 0.5, layers, 0),
    )
    for start, stop in kept.marks:
        axes.axvspan(start - 0.5, stop - 0.5, facecolor="none", edgecolor=_MARK, linewidth=0.8)
    step = max(1, layers // 6)
    axes.set_yticks([place + 0.5 for place in range(0, layers, step)], [str(n) for n in kept.layers[::step]])
    axes.set_ylabel("layer" + (f" (rows: its {heads} heads)" if heads > 1 else ""))
    for side in ("top", "right"):
        axes.spines[side].set_visible(True)
    for spine in axes.spines.values():
        spine.set(color="#CCCCCC", linewidth=0.6)
