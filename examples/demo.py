"""Prune the cache of a long document to a fifth, and ask questions about the document: ``make demo``.

    python examples/demo.py --pair smollm2 --ratio 0.2

Facts are hidden in the document. The document is prefilled once. ProxyKV, KVzip, the head prior alone and random scores
each keep the same number of KV pairs, without seeing the questions. Then each cache is asked all questions.
"""

from __future__ import annotations

import argparse
import sys

from comparing import compare
from hidden_facts import hidden_facts
from pairs import PAIRS, load_pair
from tqdm import tqdm

from proxykv_hf import HeadPriorScorer, KVzipScorer, RandomScorer, Scorer

#: Tokens and facts of a document, so that the target can still recall the facts from its full cache.
LENGTHS = {"smollm2": (500, 2), "qwen2.5-coder": (1000, 8)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=sorted(PAIRS), default="smollm2")
    parser.add_argument("--ratio", type=float, default=0.2, help="share of KV pairs kept (default: 0.2)")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokens, facts = LENGTHS[arguments.pair]
    target, tokenizer, proxykv = load_pair(arguments.pair)
    scorers: dict[str, Scorer] = {
        "proxykv": proxykv,
        "kvzip": KVzipScorer(tokenizer),
        "head_prior": HeadPriorScorer(proxykv.mapper.head_prior()),
        "random": RandomScorer(),
    }
    right: dict[str, int] = {}
    sizes: dict[str, int] = {}
    phases: dict[str, float] = {}
    for number in tqdm(range(arguments.documents), desc="documents", file=sys.stderr):
        sample = hidden_facts(tokenizer, tokens, facts, arguments.seed + number)
        outcomes, seconds = compare(target, tokenizer, sample, scorers, [arguments.ratio])
        for outcome in outcomes:
            right[outcome.method] = right.get(outcome.method, 0) + sum(outcome.right)
            sizes[outcome.method] = sizes.get(outcome.method, 0) + outcome.kv_bytes
        for phase, value in seconds.items():
            phases[phase] = phases.get(phase, 0.0) + value

    asked = arguments.documents * facts
    spent = {name: phases[f"wait {name}"] for name in scorers} | {"proxykv": phases["proxy"] + phases["mapper"]}
    print(f"\n{PAIRS[arguments.pair].target}, {arguments.documents} documents of {tokens} tokens")
    print(f"{'':12} {'answers right':>14} {'KV MB':>8} {'seconds to score':>17}")
    for method in ("full", *scorers):
        scoring = f"{spent[method] / arguments.documents:.2f}" if method in spent else ""
        megabytes = sizes[method] / arguments.documents / 1e6
        print(f"{method:12} {f'{right[method]} of {asked}':>14} {megabytes:>8.1f} {scoring:>17}")
    print(f"(the target's own prefill: {phases['prefill'] / arguments.documents:.2f} s a document)")


if __name__ == "__main__":
    main()
