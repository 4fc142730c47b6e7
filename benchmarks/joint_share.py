"""How well `JointScorer` agrees with KVzip for each share of the hidden states, from 0, the proxy alone, to 1.

    python benchmarks/joint_share.py --target qwen2.5-coder-1.5b --mapper mappers/qwen2.5-coder \
        --proxy qwen2.5-coder-0.5b --hidden-state mappers/qwen2.5-coder-hidden_state --dtype bfloat16 --teacher FOLDER

The folders hold shards that `proxykv teacher` wrote for the target; documents that are not held out are passed over.
A table in Markdown: the share of KVzip's kept KV pairs that is kept too, the mean over documents.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from proxykv_hf import InvalidInputError, ModelGeometry, ProxyKVError, ProxyPrunedCache, RetentionPolicy, Scorer
from proxykv_hf.commands import sources
from proxykv_hf.commands.models import add_device_and_dtype, add_target
from proxykv_hf.geometry import device_of
from proxykv_hf.training.dataset import SCORE_FLOOR
from proxykv_hf.training.metrics import mean_agreement, mean_metrics, measure
from proxykv_hf.training.shards import ScoredDocument, load_shards

METHODS = ("proxykv", "hidden_state")
COLUMNS = [f"{name}@{ratio}" for name in ("head", "global") for ratio in (0.1, 0.2, 0.3, 0.5)]


def log_scores(
    target: PreTrainedModel, scorers: dict[str, Scorer], document: ScoredDocument
) -> tuple[Tensor, Tensor, Tensor]:
    """By the proxy, by the hidden states and by KVzip, `[L, H, n]` each."""
    ids, start = document.input_ids.long()[None], document.prefix_tokens
    with ProxyPrunedCache(target, None, RetentionPolicy(1.0), strict=True) as cache:
        found = cache.prefill(ids.to(device_of(target)), context=(start, ids.shape[1]), prune=False, scorers=scorers)
    full = list(ModelGeometry.from_config(target.config).full_layers)
    proxy, hidden_state = (found[name][0, full, :, start:].cpu() for name in METHODS)
    return proxy, hidden_state, document.scores[full].float().clamp(min=SCORE_FLOOR).log()


def table(found: dict[float, list[dict[str, float]]]) -> str:
    """A line for each share."""
    lines = ["| share | " + " | ".join(COLUMNS) + " | mean |", "|---" * (len(COLUMNS) + 2) + "|"]
    for share, documents in found.items():
        means = mean_metrics(documents)
        values = [*(f"{means[name]:.3f}" for name in COLUMNS), f"{mean_agreement(means):.4f}"]
        lines.append(f"| {share:.2f} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_target(parser)
    sources.add_sources(parser)
    add_device_and_dtype(parser)
    parser.add_argument("--teacher", type=Path, required=True, action="append", metavar="FOLDER")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.25, 1 / 3, 0.5, 0.75, 1.0])
    asked = parser.parse_args(arguments)
    found: dict[float, list[dict[str, float]]] = {share: [] for share in asked.shares}
    try:
        sources.check(asked, METHODS)
        target, _, scorers = sources.load_scorers(asked, METHODS)
        geometry = ModelGeometry.from_config(target.config)
        documents = [document for folder in asked.teacher for document in load_shards(folder, geometry=geometry)]
        held_out = [document for document in documents if document.split == "held_out"]
        if not held_out:
            raise InvalidInputError("expected documents that are held out: `proxykv teacher --split held_out`")
        for document in tqdm(held_out, disable=None):
            proxy, hidden_state, teacher = log_scores(target, scorers, document)
            for share, metrics in found.items():
                metrics.append(measure(torch.lerp(proxy, hidden_state, share), teacher))
    except ProxyKVError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(table(found))


if __name__ == "__main__":
    main()
