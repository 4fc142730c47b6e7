"""Attention over ragged heads: what it costs, and what it saves.

    python benchmarks/decode_attention.py ragged --tokens 8192
    python benchmarks/decode_attention.py allocation --target qwen2.5-coder-1.5b --tokens 1024
    python benchmarks/decode_attention.py bytes --tokens 4096

``ragged`` times `ragged_attention` against scaled_dot_product_attention over the same heads, padded to the longest head
and masked. ``allocation`` times decoding from two caches of equal bytes: the heads of one keep unequal numbers of KV
pairs (``global``), those of the other equal numbers (``uniform``). ``bytes`` compares the bytes of a whole pruned cache
with its budget. Runs are interleaved, and all results are medians. Without ``--target`` the model is tiny and random.
Each command prints a JSON line per setting, and a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from models import load
from random_models import random_target

from proxykv_hf import FixedScorer, ProxyPrunedCache, RetentionPolicy
from proxykv_hf.bench.measure import decode, synchronize, target_threads
from proxykv_hf.cache.ragged import ragged_attention
from proxykv_hf.cache.storage import DenseStorage, RaggedStorage, storage_bytes


def head_lengths(spread: str, heads: int, longest: int) -> list[int]:
    """The number of tokens of each head, from 1 to ``longest``."""
    if spread == "linear":
        return [round(length) for length in torch.linspace(1, longest, heads).tolist()]
    return [round(longest ** (head / max(1, heads - 1))) for head in range(heads)]


def ragged_pair(
    lengths: Sequence[int], group: int, head_dim: int, queries: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, RaggedStorage, DenseStorage, Tensor]:
    """Random heads of unequal lengths, followed by ``queries`` tokens that all heads have, in both kinds of storage.

    Returns: query `[1, H * G, q, D]`; the ragged storage; the same KV pairs padded to the longest head,
        `[1, H, N + q, D]`; the attention mask of the padded heads, `[1, H, q, N + q]`, true where a query attends.
    """
    heads, longest = len(lengths), max(lengths)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    keys, values = random(1, heads, longest, head_dim), random(1, heads, longest, head_dim)
    keep = torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]  # [H, N]
    padded = DenseStorage(keys, values)
    ragged = RaggedStorage.empty(keys, values, keep[None], torch.tensor([0]))
    ragged.fill(keys, values, keep[None], [0])
    new = random(1, heads, queries, head_dim), random(1, heads, queries, head_dim)
    padded.append(*new)
    ragged.append(*new)
    causal = torch.ones(queries, queries, dtype=torch.bool, device=device).tril()
    mask = torch.cat([keep[:, None].expand(-1, queries, -1), causal.expand(heads, -1, -1)], dim=2)
    return random(1, heads * group, queries, head_dim), ragged, padded, mask[None]


def padded_attention(query: Tensor, padded: DenseStorage, mask: Tensor) -> Tensor:
    """Attention over padded heads, `[1, q, H * G, D]`, with one product for each head's query group."""
    heads, queries = mask.shape[1], query.shape[2]
    rows = query.unflatten(1, (heads, -1)).flatten(2, 3)  # [1, H, G * q, D]
    seen = mask.repeat(1, 1, rows.shape[2] // queries, 1)  # [1, H, G * q, N + q]
    output = functional.scaled_dot_product_attention(rows, padded.keys, padded.values, attn_mask=seen)
    return output.unflatten(2, (-1, queries)).flatten(1, 2).transpose(1, 2)


def median_seconds(works: Sequence[Callable[[], Any]], repeats: int, device: torch.device) -> list[float]:
    """The median seconds of each of ``works``, which run in turns; the first turn is not counted."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(repeats + 1):
        for work, taken in zip(works, seconds, strict=True):
            synchronize(device)
            started = time.perf_counter()
            work()
            synchronize(device)
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken[1:]) for taken in seconds]


@torch.no_grad()
def run_ragged(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the time and bytes of ragged heads against the same heads padded."""
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    rows = []
    for spread in ("linear", "geometric"):
        lengths = head_lengths(spread, arguments.heads, arguments.tokens)
        for queries in arguments.queries:
            query, ragged, padded, mask = ragged_pair(
                lengths, arguments.group, arguments.head_dim, queries, device, dtype
            )
            works = [partial(ragged_attention, query, ragged, None), partial(padded_attention, query, padded, mask)]
            ours, twin = (work() for work in works)
            seconds, padded_seconds = median_seconds(works, arguments.repeats, device)
            held = storage_bytes(ragged.tensors()) - storage_bytes(ragged.tail.tensors())
            rows.append(
                {
                    "spread": spread,
                    "queries": queries,
                    "ragged_ms": round(1e3 * seconds, 3),
                    "padded_ms": round(1e3 * padded_seconds, 3),
                    "ratio": round(seconds / padded_seconds, 3),
                    "kept_bytes": held,
                    "is_sum_of_lengths": held == 2 * sum(lengths) * arguments.head_dim * query.element_size(),
                    "largest_difference": float((ours.float() - twin.float()).abs().max()),
                }
            )
    return rows


def open_target(name: str | None) -> PreTrainedModel:
    """Load a model by a name of ``examples/models.py``; None gives a tiny random one."""
    return random_target("tiny", torch.device("cpu"), torch.float32) if name is None else load(name)[0]


def random_ids(target: PreTrainedModel, tokens: int) -> Tensor:
    """Random token ids, `[1, tokens]`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, target.config.vocab_size, (1, tokens), generator=generator).to(target.device)


def random_scores(target: PreTrainedModel, tokens: int) -> Tensor:
    """Random scores, `[1, L, H, tokens]`: ``global`` keeps few KV pairs of some heads, and most of others."""
    shape = (1, target.config.num_hidden_layers, target.config.num_key_value_heads)
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(*shape, tokens, generator=generator) + torch.rand(*shape, 1, generator=generator)
    return scores.to(target.device)


def policy(ratio: float, allocation: Literal["global", "uniform"]) -> RetentionPolicy:
    """A policy without protected tokens, as in all measurements."""
    return RetentionPolicy(ratio, allocation=allocation, sink_tokens=0, recent_tokens=0)


def run_allocation(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure decoding at equal bytes, with unequal and with equal heads."""
    target = open_target(arguments.target)
    ids = random_ids(target, arguments.tokens + 1)
    scores = random_scores(target, arguments.tokens)
    policies = {"global": policy(arguments.ratio, "global"), "uniform": policy(arguments.ratio, "uniform")}
    speeds: dict[str, list[float]] = {name: [] for name in policies}
    held: dict[str, int] = {}
    with ProxyPrunedCache(target, FixedScorer(scores), policy(1.0, "global"), strict=True) as whole:
        whole.prefill(ids[:, :-1], prune=False)
        for _ in range(arguments.repeats + 1):
            for name, kept in policies.items():
                with whole.compress(scores, kept) as pruned:
                    held[name] = pruned.report().bytes_kept
                    started = time.perf_counter()
                    decode(target, pruned, ids[:, -1:], arguments.new_tokens)
                    speeds[name].append(arguments.new_tokens / (time.perf_counter() - started))
    speed = {name: statistics.median(values[1:]) for name, values in speeds.items()}  # the first turn warms up
    return [
        {
            "allocation": name,
            "tokens_per_second": round(speed[name], 2),
            "over_uniform": round(speed[name] / speed["uniform"], 3),
            "kept_bytes": held[name],
        }
        for name in policies
    ]


def run_bytes(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the bytes of a whole pruned cache, in percent of its budget."""
    target = open_target(arguments.target)
    ids, scores = random_ids(target, arguments.tokens), random_scores(target, arguments.tokens)
    rows = []
    for ratio in arguments.ratios:
        with ProxyPrunedCache(target, FixedScorer(scores), policy(ratio, "global"), strict=True) as cache:
            cache.prefill(ids)
            report = cache.report()
        rows.append(
            {
                "ratio": ratio,
                "kept_bytes": report.bytes_kept,
                "full_bytes": report.bytes_full,
                "percent_of_budget": round(100 * report.bytes_kept / (ratio * report.bytes_full), 2),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    ragged, allocation, held = (commands.add_parser(name) for name in ("ragged", "allocation", "bytes"))
    ragged.add_argument("--heads", type=int, default=8)
    ragged.add_argument("--group", type=int, default=4, help="query heads per KV head")
    ragged.add_argument("--head-dim", type=int, default=128)
    ragged.add_argument("--queries", type=int, nargs="+", default=[1, 16])
    ragged.add_argument("--device", default="cpu")
    ragged.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    for command in (allocation, held):
        command.add_argument("--target", help="a name of examples/models.py (default: a tiny random model)")
    allocation.add_argument("--ratio", type=float, default=0.3)
    allocation.add_argument("--new-tokens", type=int, default=32)
    held.add_argument("--ratios", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.3, 0.5])
    for command, tokens in ((ragged, 8192), (allocation, 1024), (held, 4096)):
        command.add_argument("--tokens", type=int, default=tokens)
    for command, repeats in ((ragged, 20), (allocation, 5)):
        command.add_argument("--repeats", type=int, default=repeats)
    for command in (ragged, allocation, held):
        command.add_argument("--threads", type=int, help="CPU threads")
    arguments = parser.parse_args(given)
    with target_threads(arguments.threads):
        rows = {"ragged": run_ragged, "allocation": run_allocation, "bytes": run_bytes}[arguments.command](arguments)
    for row in rows:
        print(json.dumps({"benchmark": arguments.command, "tokens": arguments.tokens, **row}))
    print(table(rows))


if __name__ == "__main__":
    main()
