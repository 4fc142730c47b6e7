"""Check that the package is correct and fast on this GPU, in one command of about five minutes, without a download.

    python benchmarks/gpu_check.py --out gpu_check.json

The models have random weights, in bfloat16, and real geometries: the target is like Qwen2.5-7B, and the proxy is like
the first 14 layers of Qwen2.5-1.5B. First the script checks correctness: attention over ragged heads against a float32
reference, and scores from the lane, under artificial delays, against scores computed without a lane. Then it measures
costs at 16k and 64k tokens: the time until the cache is pruned with every schedule (and with kvzip at 16k), decoding,
peak memory, and the share of the proxy's time that is hidden behind the target's. The exit status is 1 if a check
fails, and 2 without a GPU. ``--tiny`` runs the same on tiny models, also on a CPU, where what needs CUDA events is left
out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

# Set before torch starts cuBLAS: products are then bitwise equal on every stream.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from decode_attention import head_lengths, padded_attention, ragged_pair
from random_models import byte_tokenizer, random_mapper, random_proxy, random_target
from torch import Tensor
from transformers import PreTrainedModel

from proxykv_hf import FeatureRecipe, KVzipScorer, ProxyPrunedCache, ProxyScorer, RetentionPolicy
from proxykv_hf.bench.measure import Plan, environment, make_methods, runs, synchronize
from proxykv_hf.bench.report import check_writable, markdown, summarize, write_results
from proxykv_hf.cache.ragged import ragged_attention
from proxykv_hf.cache.storage import DenseStorage
from proxykv_hf.proxy.features import decoder_layers, proxy_features
from proxykv_hf.scorers.base import Scorer

POLICY = RetentionPolicy(0.3, sink_tokens=0, recent_tokens=0)
SCHEDULES = ("overlap", "proxy_first", "sequential")
#: The absolute and relative tolerance of bfloat16 against float32: a difference may be this times (1 + the value).
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Setting:
    """One size of the check.

    Args:
        target, proxy: Keys of `random_models.GEOMETRIES`.
        recipe: The features that the mapper reads.
        lengths: Prompt lengths in tokens; kvzip runs only at the first.
        order_tokens: Prompt length in `check_order`, in tokens.
        longest_head: Length of the longest head in `check_attention`, in tokens.
        new_tokens: Tokens decoded.
        delay_cycles: How long a stream is delayed, in GPU cycles.
    """

    target: str
    proxy: str
    recipe: FeatureRecipe
    lengths: tuple[int, int]
    order_tokens: int
    longest_head: int
    new_tokens: int
    delay_cycles: int


REAL = Setting(
    target="qwen2.5-7b",
    proxy="qwen2.5-1.5b",
    recipe=FeatureRecipe(("hidden",), 14, (2, 6, 10, 14)),
    lengths=(16384, 65536),
    order_tokens=2048,
    longest_head=8192,
    new_tokens=32,
    delay_cycles=10**8,
)
TINY = Setting(
    target="tiny",
    proxy="tiny-proxy",
    recipe=FeatureRecipe(("hidden",), 2, (1, 2)),
    lengths=(256, 512),
    order_tokens=64,
    longest_head=200,
    new_tokens=4,
    delay_cycles=10**6,
)


class TimedScorer(ProxyScorer):
    """A `ProxyScorer` that can delay its lane and, on CUDA, records when the lane's work begins and ends."""

    before: Callable[[], None] | None = None
    began: torch.cuda.Event
    ended: torch.cuda.Event

    def score_row(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.before is not None:
            self.before()
        if self.proxy.device.type != "cuda":
            return super().score_row(*args, **kwargs)
        self.began = event()
        scores = super().score_row(*args, **kwargs)
        self.ended = event()
        return scores


def event() -> torch.cuda.Event:
    """Record an event on the current stream."""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def check_attention(setting: Setting, device: torch.device) -> dict[str, Any]:
    """Compare attention over ragged heads in bfloat16 with the same heads, padded, in float32."""
    worst = 0.0
    for spread in ("linear", "geometric"):
        for queries in (1, 16):
            lengths = head_lengths(spread, 4, setting.longest_head)
            query, ragged, padded, mask = ragged_pair(lengths, 7, 128, queries, device, torch.bfloat16)
            reference = padded_attention(query.float(), DenseStorage(padded.keys.float(), padded.values.float()), mask)
            ours = ragged_attention(query, ragged, None)
            worst = max(worst, float(((ours.float() - reference).abs() / (1 + reference.abs())).max()))
    return {"check": "ragged attention", "largest_difference": worst, "is_right": worst <= TOLERANCE}


def check_order(target: PreTrainedModel, scorer: TimedScorer, setting: Setting, repetitions: int) -> dict[str, Any]:
    """Compare scores from the lane with scores computed without a lane, while the lane or the target is delayed.

    Every repetition has another prompt, so work in a wrong order reads wrong data.
    """
    device, worst = target.device, 0.0

    def delay() -> None:
        if device.type == "cuda":
            torch.cuda._sleep(setting.delay_cycles)
        else:
            time.sleep(1e-3)

    for repetition in range(repetitions):
        ids = random_ids(scorer, setting.order_tokens, seed=1 + repetition).to(device)
        features = proxy_features(scorer.proxy, ids[0], scorer.mapper.config.feature_recipe)
        expected = scorer.mapper(features[None])
        synchronize(device)
        scorer.before = delay if repetition % 2 else None
        options: dict[str, Any] = {"schedule": SCHEDULES[repetition % len(SCHEDULES)]}
        with ProxyPrunedCache(target, scorer, POLICY, strict=True, **options) as cache:
            if scorer.before is None:
                delay()
                ids = ids.clone()  # the copy is complete only when the target's stream reaches it
            scores = cache.prefill(ids)["proxykv"]
            worst = max(worst, float((scores - expected).abs().max() / expected.std()))
    scorer.before = None
    return {
        "check": "order of the lane",
        "repetitions": repetitions,
        "largest_difference": worst,
        "is_right": worst <= TOLERANCE,
    }


def measure_hidden(target: PreTrainedModel, scorer: TimedScorer, ids: Tensor, repeats: int) -> dict[str, Any]:
    """Measure the share of the proxy's time that is hidden behind the target's: medians in ms, from CUDA events.

    ``(target alone + proxy alone - both together) / proxy alone``: 1 if the proxy adds no time, 0 if it adds as much as
    it takes alone.
    """
    taken: dict[str, list[float]] = {"target": [], "proxy": [], "both": []}
    marks: dict[str, torch.cuda.Event] = {}
    handles = [
        decoder_layers(cast(PreTrainedModel, target.base_model))[0].register_forward_pre_hook(
            lambda *_: marks.update(first=event())
        ),
        target.register_forward_hook(lambda *_: marks.update(last=event())),
    ]
    try:
        for _ in range(repeats + 1):
            for schedule in ("sequential", "overlap"):
                options: dict[str, Any] = {"schedule": schedule}
                origin = event()
                with ProxyPrunedCache(target, scorer, POLICY, strict=True, **options) as cache:
                    cache.prefill(ids)
                synchronize(target.device)
                if schedule == "sequential":
                    taken["target"].append(marks["first"].elapsed_time(marks["last"]))
                    taken["proxy"].append(scorer.began.elapsed_time(scorer.ended))
                else:
                    taken["both"].append(max(origin.elapsed_time(mark) for mark in (marks["last"], scorer.ended)))
    finally:
        for handle in handles:
            handle.remove()
    middle = {name: statistics.median(values[1:]) for name, values in taken.items()}  # the first turn warms up
    hidden = (middle["target"] + middle["proxy"] - middle["both"]) / middle["proxy"]
    return {"check": "share of the proxy's time hidden", "tokens": ids.shape[1], "ms": middle, "hidden": hidden}


def random_ids(scorer: ProxyScorer, tokens: int, seed: int = 0) -> Tensor:
    """Random token ids, `[1, tokens]`, from the vocabulary of the proxy, which is the smaller one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, scorer.proxy.config.vocab_size, (1, tokens), generator=generator)


def check(setting: Setting, device: torch.device, repeats: int, out: Path | None) -> bool:
    """Run everything and print each result at once; return whether all checks pass."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    header = environment(device) | {
        "target": setting.target,
        "proxy": setting.proxy,
        "dtype": str(dtype).removeprefix("torch."),
    }
    print(json.dumps(header))
    target = random_target(setting.target, device, dtype)
    proxy = random_proxy(setting.proxy, setting.recipe.proxy_layers, device, dtype)
    scorer = TimedScorer(proxy, random_mapper(target, proxy, setting.proxy, setting.recipe))

    def report(result: dict[str, Any]) -> dict[str, Any]:
        print(json.dumps(result), flush=True)
        return result

    checks = [report(check_attention(setting, device)), report(check_order(target, scorer, setting, 20))]
    scorers: dict[str, Scorer] = {"proxykv": scorer, "kvzip": KVzipScorer(byte_tokenizer())}
    rows = []
    ids = random_ids(scorer, max(setting.lengths) + 1)
    for length in setting.lengths:
        names = ["full", *(f"proxykv:{schedule}" for schedule in SCHEDULES)]
        if length == setting.lengths[0]:
            names.append("kvzip")
        plan = Plan(tuple(names), (length,), POLICY, repeats, setting.new_tokens)
        for row in runs(plan, make_methods(plan, scorers), target, None, ids):
            rows.append(row)
            print(f"{length} {row['method']} {row['seconds']:.2f} s", file=sys.stderr)
        if device.type == "cuda":
            checks.append(report(measure_hidden(target, scorer, ids[:, :length].to(device), repeats)))
        else:
            print("left out without CUDA: the share of the proxy's time that is hidden", file=sys.stderr)
    if out is not None:
        write_results(out, header | {"checks": checks}, rows)
    print(markdown(summarize(rows)))
    return all(result.get("is_right", True) for result in checks)


@torch.no_grad()
def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tiny", action="store_true", help="use tiny models, on a GPU if there is one, else on the CPU"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file for all rows")
    arguments = parser.parse_args(given)
    if not torch.cuda.is_available() and not arguments.tiny:
        print("gpu_check: torch finds no CUDA GPU here; --tiny runs the same code on tiny models", file=sys.stderr)
        return 2
    if arguments.out is not None:
        check_writable(arguments.out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if check(TINY if arguments.tiny else REAL, device, arguments.repeats, arguments.out):
        return 0
    print("gpu_check: something is wrong, see is_right above", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
