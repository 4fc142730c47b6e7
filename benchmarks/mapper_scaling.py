"""Measure what the mapper costs as the text grows, and whether its scores show the seams of its windows.

    python benchmarks/mapper_scaling.py lengths --out benchmarks/results/mapper_scaling.json
    python benchmarks/mapper_scaling.py seams --text FILE --tokens 6000 --out benchmarks/results/mapper_seams.json

``lengths``: seconds and peak memory of a shipped mapper alone, on random features, on a CPU. Each measurement runs in a
process of its own, and the lengths are measured in turns. The exponent e of ``cost ~ tokens^e`` is the slope of a
straight line through the logarithms. The seconds are CPU time and wall-clock time; on a machine with other work only
the CPU time is reliable. The memory is the peak beyond the loaded mapper, and includes the features (float32).

``seams``: the proxy's first layers read a real text. The mapper's scores are compared with those of the same mapper in
one window, in which all tokens attend to all, and with those of windows that are moved half-way. The comparison is the
share of the Top-K within heads that both keep, and the difference of log scores, by a token's distance to the nearest
seam. An effect of the seams depends on that distance. The effect of the windows themselves, that tokens do not attend
to tokens far away, appears at all distances.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoTokenizer

from proxykv_hf import HybridAxialMapper
from proxykv_hf.bench.meter import PeakMemory
from proxykv_hf.commands.models import resolve
from proxykv_hf.proxy import mapper as mapper_module
from proxykv_hf.proxy.features import proxy_features
from proxykv_hf.proxy.loading import load_first_layers

ROOT = Path(__file__).resolve().parents[1]
RATIOS = (0.1, 0.2, 0.3, 0.5)
#: The largest exponent that counts as linear, and the most bytes that the longest text may take.
LINEAR, MOST_BYTES = 1.1, 6e9
#: Distances to the nearest seam in tokens: the upper bounds of bins.
DISTANCES = (16, 32, 64, 96, 128, 256)


# Lengths.


@torch.no_grad()
def measure_one(folder: Path, tokens: int, threads: int) -> dict[str, Any]:
    """Measure one pass of the mapper over ``tokens`` tokens in this process."""
    torch.set_num_threads(threads)
    mapper = HybridAxialMapper.from_pretrained(folder).eval()
    mapper(torch.randn(1, mapper.config.channels, 1024))  # a first call does more work than later ones
    peak = PeakMemory(torch.device("cpu"))
    features = torch.randn(1, mapper.config.channels, tokens, generator=torch.Generator().manual_seed(0))
    clock, own = time.perf_counter(), time.process_time()
    scores = mapper(features)
    seconds = {"seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - own}
    return {"tokens": tokens, **seconds, "peak_bytes": peak.bytes(), "input_bytes": features.nbytes + scores.nbytes}


def exponent(lengths: Sequence[int], costs: Sequence[float]) -> float:
    """The e of ``cost ~ tokens^e``: the slope of a least-squares line through the logarithms."""
    return statistics.linear_regression([math.log(n) for n in lengths], [math.log(cost) for cost in costs]).slope


def summary(rows: Sequence[dict[str, Any]], fitted: Sequence[int]) -> dict[str, Any]:
    """Medians by length, and the exponents over the lengths of ``fitted``."""
    lengths = sorted({row["tokens"] for row in rows})
    keys = [key for key in ("seconds", "cpu_seconds", "peak_bytes", "input_bytes") if rows[0][key] is not None]
    medians = {n: {key: statistics.median(r[key] for r in rows if r["tokens"] == n) for key in keys} for n in lengths}
    exponents = {key: exponent(fitted, [medians[n][key] for n in fitted]) for key in keys[:-1]}
    return {"lengths": medians, "exponents": exponents}


def lengths_table(found: dict[str, Any]) -> str:
    """The summary as a Markdown table."""
    lines = ["| tokens | CPU s | clock s | peak GB | features and scores, GB |", "|---|---|---|---|---|"]
    for tokens, row in found["lengths"].items():
        peak = f"{row['peak_bytes'] / 1e9:.2f}" if "peak_bytes" in row else "not measured"
        cells = [f"{tokens:,}", *(f"{row[key]:.2f}" for key in ("cpu_seconds", "seconds")), peak]
        lines.append(f"| {' | '.join(cells)} | {row['input_bytes'] / 1e9:.2f} |")
    names = {"cpu_seconds": "CPU s", "seconds": "clock s", "peak_bytes": "peak"}
    fits = ", ".join(f"{names[key]} {value:.3f}" for key, value in found["exponents"].items())
    return "\n".join([*lines, f"\nExponents: {fits}; linear is at most {LINEAR}."])


def run_lengths(arguments: argparse.Namespace) -> None:
    def process(tokens: int) -> dict[str, Any]:
        command = [sys.executable, __file__, "one", "--mapper", str(arguments.mapper), "--threads"]
        done = subprocess.run(
            [*command, str(arguments.threads), "--tokens", str(tokens)], stdout=subprocess.PIPE, text=True, check=True
        )
        row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(row), file=sys.stderr, flush=True)
        return row

    rows = [process(tokens) for _ in range(arguments.repeats) for tokens in arguments.lengths]
    rows += [process(arguments.longest)]
    found = {"mapper": arguments.mapper.name, "threads": arguments.threads, "repeats": arguments.repeats}
    found |= summary(rows, arguments.lengths)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(lengths_table(found))
    longest = found["lengths"][arguments.longest].get("peak_bytes", 0)
    grown = {key: e for key, e in found["exponents"].items() if key != "seconds"}  # wall-clock time includes other work
    failed = [f"{key} grows as tokens^{e:.3f}" for key, e in grown.items() if e > LINEAR]
    failed += [f"{longest / 1e9:.2f} GB at {arguments.longest:,} tokens"] if longest > MOST_BYTES else []
    if failed:
        sys.exit(f"over the limit: {'; '.join(failed)}")


# Seams.


@contextmanager
def windows(spans: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Make mappers use these windows inside this context."""
    with mock.patch.object(mapper_module, "_windows", return_value=list(spans)):
        yield


def moved(spans: Sequence[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """Windows with seams half-way between those of ``spans``, except that the first and last fit the text's ends."""
    size, step = spans[0][1], spans[1][0]
    starts = [0, *range(step // 2, tokens - size, step), tokens - size]
    return [(start, start + size) for start in starts]


def seam_distances(spans: Sequence[tuple[int, int]], tokens: int) -> Tensor:
    """The distance of each token to the middle of the nearest overlap, `[N]`."""
    middles = torch.tensor([(later[0] + earlier[1]) / 2 for earlier, later in itertools.pairwise(spans)])
    return (torch.arange(tokens)[:, None] + 0.5 - middles).abs().amin(1)


def kept(scores: Tensor, ratio: float) -> Tensor:
    """Whether each KV pair is in the Top-K of its head, `[L, H, N]`, bool."""
    best = scores.topk(max(1, round(ratio * scores.shape[-1]))).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def by_distance(ours: Tensor, theirs: Tensor, distances: Tensor) -> dict[str, list[float]]:
    """Compare two scores, `[L, H, N]`, for each of ``DISTANCES``: their difference, and the share that both keep."""
    within = [
        (distances < stop) & (distances >= start) for start, stop in zip((0, *DISTANCES), DISTANCES, strict=False)
    ]
    found = {"difference": [float((ours - theirs).abs()[..., places].mean()) for places in within]}
    for ratio in RATIOS:
        mine, other = kept(ours, ratio), kept(theirs, ratio)
        found[str(ratio)] = [
            float((mine & other)[..., places].sum() / other[..., places].sum().clamp(min=1)) for places in within
        ]
    return found


@torch.no_grad()
def compare_windows(mapper: HybridAxialMapper, features: Tensor) -> dict[str, dict[str, list[float]]]:
    """Compare the windowed scores of features `[1, C, N]` with those of one window and of moved windows."""
    tokens = features.shape[2]
    spans = mapper_module._windows(tokens, mapper.config.window, mapper.config.overlap)
    distances = seam_distances(spans, tokens)
    ours = mapper(features)[0]
    found = {}
    for name, others in (("one window", [(0, tokens)]), ("moved windows", moved(spans, tokens))):
        with windows(others):
            found[name] = by_distance(ours, mapper(features)[0], distances)
    return found


def seams_table(found: dict[str, dict[str, list[float]]]) -> str:
    """The comparison as a Markdown table."""
    lines = [f"| to the nearest seam, tokens | {' | '.join(f'< {stop}' for stop in DISTANCES)} |"]
    lines.append(f"|---{'|---' * len(DISTANCES)}|")
    for name, rows in found.items():
        for key, values in rows.items():
            what = "difference of log scores" if key == "difference" else f"kept by both, {key}"
            lines.append(f"| {name}, {what} | {' | '.join(f'{value:.3f}' for value in values)} |")
    return "\n".join(lines)


def run_seams(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    mapper = HybridAxialMapper.from_pretrained(arguments.mapper).eval()
    recipe = mapper.config.feature_recipe
    folder = resolve(arguments.proxy)
    proxy = load_first_layers(
        folder, recipe.proxy_layers, revision=None, dtype=torch.float32, device=torch.device("cpu")
    )
    text = arguments.text.read_text(encoding="utf-8")
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text).input_ids[: arguments.tokens])
    if len(ids) < 2 * mapper.config.window:
        sys.exit(f"{arguments.text}: expected at least {2 * mapper.config.window} tokens, two windows, got {len(ids)}")
    found = compare_windows(mapper, proxy_features(proxy, ids, recipe)[None])
    result = {"mapper": arguments.mapper.name, "text": arguments.text.name, "tokens": len(ids), "up_to": DISTANCES}
    arguments.out.write_text(json.dumps(result | found, indent=1) + "\n")
    print(seams_table(found))
    if arguments.plot is not None:
        plot(found, arguments.plot, f"{len(ids):,} tokens of {arguments.text.name}")


def plot(found: dict[str, dict[str, list[float]]], path: Path, title: str) -> None:
    """Draw the share that both keep, against the distance to the nearest seam."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, (name, rows) in zip(figure.subplots(1, len(found), sharey=True), found.items(), strict=True):
        for ratio in RATIOS:
            axes.plot(range(len(DISTANCES)), rows[str(ratio)], marker="o", label=f"{ratio} kept")
        axes.set_xticks(range(len(DISTANCES)), [f"< {stop}" for stop in DISTANCES])
        axes.set(title=f"against {name}", xlabel="tokens to the nearest seam", ylim=(0.9, 1.0))
    figure.axes[0].set_ylabel("kept by both")
    figure.axes[0].legend(loc="lower right")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def run_one(arguments: argparse.Namespace) -> None:
    print(json.dumps(measure_one(arguments.mapper, arguments.tokens, arguments.threads)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{lengths,seams}")
    lengths, seams, one = (commands.add_parser(name) for name in ("lengths", "seams", "one"))
    for command in (lengths, seams, one):
        command.add_argument("--mapper", type=Path, default=ROOT / "mappers" / "qwen2.5-coder")
        command.add_argument("--threads", type=int, default=1)
    lengths.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    lengths.add_argument("--longest", type=int, default=170_000, help="a length that is measured once, for its memory")
    lengths.add_argument("--repeats", type=int, default=3)
    seams.add_argument("--text", type=Path, required=True)
    seams.add_argument("--tokens", type=int, default=6000)
    seams.add_argument("--proxy", default="qwen2.5-coder-0.5b", help="a folder, or a name of examples/models.py")
    seams.add_argument("--plot", type=Path, help="also draw a plot (needs matplotlib)")
    for command in (lengths, seams):
        command.add_argument("--out", type=Path, required=True)
    one.add_argument("--tokens", type=int, required=True)
    arguments = parser.parse_args()
    {"lengths": run_lengths, "seams": run_seams, "one": run_one}[arguments.command](arguments)


if __name__ == "__main__":
    main()
