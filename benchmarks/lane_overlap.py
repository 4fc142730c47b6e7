"""Does the proxy run beside the target? One core each, a document of 1,000 tokens.

    python benchmarks/lane_overlap.py --pair qwen2.5-coder

Prints (t_proxy + t_target - t_both) / min(t_proxy, t_target), the share of the shorter one's time that
is hidden behind the other's, from interleaved runs, and its median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from hidden_facts import hidden_facts
from pairs import PAIRS, load_pair

from proxykv_hf import ProxyPrunedCache, RandomScorer, RetentionPolicy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=sorted(PAIRS), default="qwen2.5-coder")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mapper", type=Path, default=None)
    arguments = parser.parse_args()
    target, tokenizer, scorer = load_pair(arguments.pair, arguments.mapper, threads=1)
    torch.set_num_threads(1)
    text = hidden_facts(tokenizer, arguments.tokens, 4, 0).text
    ids = tokenizer([text], return_tensors="pt", add_special_tokens=False).input_ids
    policy = RetentionPolicy(0.3)

    def both() -> None:
        with ProxyPrunedCache(target, scorer, policy, strict=True) as cache:
            cache.prefill(ids)

    def target_alone() -> None:
        with ProxyPrunedCache(target, RandomScorer(), policy) as cache:
            cache.prefill(ids)

    def proxy_alone() -> None:
        from proxykv_hf.features import proxy_features

        with torch.no_grad():
            scorer.mapper(proxy_features(scorer.proxy, ids[0], scorer.mapper.config.feature_recipe)[None])

    def seconds(work: Callable[[], None]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    proxy_alone()
    hidden = []
    for _ in range(arguments.repeats):
        t_target, t_proxy, t_both = seconds(target_alone), seconds(proxy_alone), seconds(both)
        hidden.append((t_proxy + t_target - t_both) / min(t_proxy, t_target))
        row = {"target": t_target, "proxy": t_proxy, "both": t_both, "hidden": hidden[-1]}
        print(json.dumps({name: round(value, 2) for name, value in row.items()}), flush=True)
    print(json.dumps({"tokens": ids.shape[1], "median hidden": round(statistics.median(hidden), 2)}))


if __name__ == "__main__":
    main()
