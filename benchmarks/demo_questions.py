"""How many questions each method still answers, at the same bytes, over one prefill per document.

    python benchmarks/demo_questions.py --pair qwen2.5-coder --documents 10 --out results.jsonl

Each document of 1,000 tokens hides 4 to 16 facts (seeded); the questions are not seen by any method.
A row per document goes to ``--out`` as it is done, and a run that is started again goes on after them.
Then a table: answers right, and the paired difference to ProxyKV with its 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from comparing import compare
from hidden_facts import hidden_facts
from pairs import PAIRS, all_scorers, load_pair
from tqdm import tqdm

FACTS = (4, 6, 8, 10, 12, 16)


def interval(differences: Sequence[float], samples: int = 10_000) -> tuple[float, float]:
    """95 % bootstrap interval of the mean, seeded."""
    rng = random.Random(0)
    means = sorted(sum(rng.choices(differences, k=len(differences))) / len(differences) for _ in range(samples))
    return means[int(0.025 * samples)], means[int(0.975 * samples) - 1]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: methods by ratios."""
    right: dict[tuple[str, float], list[float]] = {}
    size: dict[tuple[str, float], list[int]] = {}
    for row in rows:
        for outcome in row["outcomes"]:
            key = (outcome["method"], outcome["ratio"])
            right.setdefault(key, []).extend(map(float, outcome["right"]))
            size.setdefault(key, []).append(outcome["kv_bytes"])
    lines = ["| kept | method | answers right | KV MB | ProxyKV's lead, points (95 %) |", "|---|---|---|---|---|"]
    for method, ratio in sorted(right, key=lambda key: (-key[1], -sum(right[key]))):
        answers, lead = right[method, ratio], ""
        if ratio < 1 and method != "proxykv":
            gaps = [100 * (a - b) for a, b in zip(right["proxykv", ratio], answers, strict=True)]
            low, high = interval(gaps)
            lead = f"{sum(gaps) / len(gaps):+.1f} ({low:+.1f} to {high:+.1f})"
        megabytes = sum(size[method, ratio]) / len(size[method, ratio]) / 1e6
        share = f"{sum(answers):.0f} of {len(answers)} = {sum(answers) / len(answers):.2f}"
        lines.append(f"| {ratio} | {method} | {share} | {megabytes:.1f} | {lead} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=sorted(PAIRS), default="qwen2.5-coder")
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.1, 0.2])
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--mapper", type=Path, default=None, help="another mapper than the shipped one")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.is_file() else []
    done = {row["seed"] for row in rows}
    target, tokenizer, proxykv = load_pair(arguments.pair, arguments.mapper)
    scorers = all_scorers(arguments.pair, tokenizer, proxykv)
    for number in tqdm(range(arguments.documents), desc="documents"):
        seed = arguments.seed + number
        if seed in done:
            continue
        sample = hidden_facts(tokenizer, arguments.tokens, FACTS[number % len(FACTS)], seed)
        outcomes, seconds = compare(target, tokenizer, sample, scorers, arguments.ratios)
        rows.append({"seed": seed, "seconds": seconds, "outcomes": [dataclasses.asdict(o) for o in outcomes]})
        with arguments.out.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
