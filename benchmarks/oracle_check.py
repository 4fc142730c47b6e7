"""Check on a real model that the oracle, `KVzipScorer`, is correct and works. Prints JSON lines.

    python benchmarks/oracle_check.py twin --target qwen2.5-coder-1.5b
    python benchmarks/oracle_check.py teacher --target qwen2.5-coder-1.5b --scores FOLDER --documents 10
    python benchmarks/oracle_check.py questions --target qwen2.5-coder-1.5b --documents 10

``twin`` compares `KVzipScorer` with whole attention matrices of an eager forward. ``teacher`` compares it with scores
computed independently (safetensors files with ``input_ids`` and ``scores``). ``questions`` asks a full cache and pruned
ones for facts that are hidden in documents; the caches are pruned without the questions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from hidden_facts import hidden_facts
from models import load

from proxykv_hf import KVzipScorer, ProxyPrunedCache, RetentionPolicy
from proxykv_hf._compat import cache_keyword, call_forward
from proxykv_hf.attention.reconstruction import SINK_TOKENS, repeat_inputs
from proxykv_hf.cache.retention import top_k_mask
from proxykv_hf.chat import chat_affixes, encode

RATIOS = (0.1, 0.2, 0.3, 0.5)


def whole(ratio: float = 0.3) -> RetentionPolicy:
    """A policy without protected tokens, as in all measurements."""
    return RetentionPolicy(ratio, sink_tokens=0, recent_tokens=0)


def oracle_scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Tensor, context: tuple[int, int]
) -> Tensor:
    """The scores of the context from `KVzipScorer`, `[L, H, N]`."""
    with ProxyPrunedCache(model, KVzipScorer(tokenizer), whole()) as cache:
        scores = cache.prefill(ids[None], context=context, prune=False)["kvzip"]
    return scores[0, :, :, slice(*context)].cpu()


@torch.no_grad()
def twin_scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Tensor, context: tuple[int, int]
) -> Tensor:
    """The scores of the context from whole attention matrices, `[L, H, N]`: slow and simple, for one chunk only."""
    ((start, stop, repeat),) = repeat_inputs(tokenizer, ids[slice(*context)])
    backend = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        attentions = call_forward(
            model, input_ids=torch.cat([ids, repeat])[None], cache=DynamicCache(), output_attentions=True
        ).attentions
    finally:
        model.set_attn_implementation(backend)
    heads = model.config.num_key_value_heads
    first = min(SINK_TOKENS, context[0])
    scores = []
    for weights in attentions:  # [1, Q, N, N]
        own = weights[0, :, len(ids) :]
        document = own[:, :, context[0] + start : context[0] + stop]
        denominator = own[:, :, :first].sum(-1) + document.sum(-1) + own[:, :, len(ids) :].sum(-1)
        share = document / denominator[..., None]
        scores.append(share.unflatten(0, (heads, -1)).amax(dim=(1, 2)))
    return torch.stack(scores).cpu()


def agreement(ours: Tensor, theirs: Tensor, ratio: float, within_heads: bool) -> float:
    """Share of the Top-K that two score tensors `[L, H, N]` have in common."""
    rows = (ours.shape[0] * ours.shape[1], -1) if within_heads else (1, -1)
    a, b = ours.float().reshape(rows), theirs.float().reshape(rows)
    count = max(1, round(ratio * a.shape[1]))
    a_kept, b_kept = top_k_mask(a, count), top_k_mask(b, count)
    return float((a_kept & b_kept).sum() / b_kept.sum())


def compare(ours: Tensor, theirs: Tensor) -> dict[str, Any]:
    """The largest difference of two scores, and their agreement at each ratio."""
    return {
        "largest_difference": float((ours.float() - theirs.float()).abs().max()),
        "global": {ratio: round(agreement(ours, theirs, ratio, False), 4) for ratio in RATIOS},
        "within_heads": {ratio: round(agreement(ours, theirs, ratio, True), 4) for ratio in RATIOS},
    }


def run_twin(arguments: argparse.Namespace) -> None:
    model, tokenizer = load(arguments.target)
    prefix = encode(tokenizer, chat_affixes(tokenizer)[0])
    document = encode(tokenizer, hidden_facts(tokenizer, arguments.tokens, 4, arguments.seed).text)
    ids, context = torch.tensor(prefix + document), (len(prefix), len(prefix) + len(document))
    result = compare(oracle_scores(model, tokenizer, ids, context), twin_scores(model, tokenizer, ids, context))
    print(json.dumps({"check": "twin", "target": arguments.target, "tokens": len(ids), **result}))


def run_teacher(arguments: argparse.Namespace) -> None:
    files = sorted(arguments.scores.glob("*.safetensors"))[: arguments.documents]
    if not files:
        sys.exit(f"--scores: expected a folder of safetensors files to compare with, found none in {arguments.scores}")
    model, tokenizer = load(arguments.target)
    lowest = 1.0
    for path in tqdm(files, desc="documents"):
        with safe_open(path, framework="pt") as file:
            ids, theirs = file.get_tensor("input_ids").long(), file.get_tensor("scores")
        context = (len(ids) - theirs.shape[-1], len(ids))
        # Round our scores as theirs are rounded, so that both have the same ties.
        result = compare(oracle_scores(model, tokenizer, ids, context).to(theirs.dtype), theirs)
        lowest = min(lowest, *result["global"].values(), *result["within_heads"].values())
        print(json.dumps({"check": "teacher", "document": path.name, "tokens": len(ids), **result}), flush=True)
    print(json.dumps({"check": "teacher", "documents": len(files), "lowest_agreement": lowest}))


@torch.no_grad()
def ask(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: Any, ids: list[int], question: str) -> str:
    """Answer a question greedily. ``cache`` holds ``ids``, and cannot be used again."""
    turn = encode(tokenizer, f"\n\n{question}{chat_affixes(tokenizer)[1]}")
    inputs = torch.tensor([ids + turn], device=model.device)
    out = model.generate(  # type: ignore[operator]
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=16,
        do_sample=False,
        **{cache_keyword(model): cache},
    )
    return str(tokenizer.decode(out[0, inputs.shape[1] :], skip_special_tokens=True))


def run_questions(arguments: argparse.Namespace) -> None:
    model, tokenizer = load(arguments.target)
    prefix = encode(tokenizer, chat_affixes(tokenizer)[0])
    right: dict[str, int] = {"full": 0} | {f"kvzip {ratio}": 0 for ratio in arguments.ratios}
    asked = 0
    for seed in tqdm(range(arguments.documents), desc="documents"):
        sample = hidden_facts(tokenizer, arguments.tokens, arguments.facts, arguments.seed + seed)
        ids = prefix + encode(tokenizer, sample.text)
        started = time.perf_counter()
        with ProxyPrunedCache(model, KVzipScorer(tokenizer), whole()) as cache:
            scores = cache.prefill(torch.tensor([ids]), context=(len(prefix), len(ids)), prune=False)["kvzip"]
            caches = {"full": cache} | {
                f"kvzip {ratio}": cache.compress(scores, whole(ratio)) for ratio in arguments.ratios
            }
            missed = []
            for name, filled in caches.items():
                for question, _, number in sample.questions:
                    with filled.fork() as fork:
                        answer = ask(model, tokenizer, fork, ids, question)
                    right[name] += number in answer
                    if number not in answer:
                        missed.append({"cache": name, "number": number, "answer": answer})
            bytes_kept = {name: filled.report().bytes_kept for name, filled in caches.items()}
        asked += len(sample.questions)
        row = {"check": "questions", "seed": arguments.seed + seed, "tokens": len(ids), "asked": asked, **right}
        row |= {"missed": missed, "bytes": bytes_kept, "seconds": round(time.perf_counter() - started, 1)}
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    twin = commands.add_parser("twin")
    teacher = commands.add_parser("teacher")
    questions = commands.add_parser("questions")
    for command in (twin, teacher, questions):
        command.add_argument("--target", default="qwen2.5-coder-1.5b")
    for command in (twin, questions):
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--tokens", type=int, default=500)
    for command in (teacher, questions):
        command.add_argument("--documents", type=int, default=10)
    teacher.add_argument("--scores", type=Path, required=True)
    questions.add_argument("--facts", type=int, default=4)
    questions.add_argument("--ratios", type=float, nargs="+", default=[0.3, 0.2, 0.1])
    arguments = parser.parse_args()
    {"twin": run_twin, "teacher": run_teacher, "questions": run_questions}[arguments.command](arguments)


if __name__ == "__main__":
    main()
