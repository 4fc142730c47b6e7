"""Train the linear heads of `HiddenStateScorer` on a teacher's scores, and measure how well they agree with KVzip.

    python benchmarks/train_hidden_state.py --target qwen2.5-coder-1.5b --dtype bfloat16 \
        --teacher FOLDER --teacher FOLDER --out mappers/qwen2.5-coder-hidden_state

The folders hold shards that `proxykv teacher` wrote for the target. Documents that the shards mark as held out are not
trained on, only measured on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
from models import MODELS, load
from tqdm import tqdm
from transformers import PreTrainedModel

from proxykv_hf import InvalidInputError, ModelGeometry, ProxyKVError
from proxykv_hf.geometry import weights_fingerprint
from proxykv_hf.training.dataset import taught_shards
from proxykv_hf.training.hidden_state import agreement, train
from proxykv_hf.training.metrics import describe
from proxykv_hf.training.shards import ScoredDocument, Shard, read_entries, read_shard


def shards_of(folders: list[Path], model: PreTrainedModel) -> list[Shard]:
    """The shards of all folders, after a check that they are the target's and hold documents of both splits."""
    shards = taught_shards(folders, ModelGeometry.from_config(model.config), weights_fingerprint(model))
    sides = {entry["split"] for shard in shards for entry in read_entries(shard.path, shard.identity).values()}
    if missing := {"train", "held_out"} - sides:
        raise InvalidInputError(
            f"expected documents to train on and held-out ones, found none that are {' or '.join(sorted(missing))}: "
            f"run `proxykv teacher --split {missing.pop()}` and give its folder too"
        )
    return shards


def documents(shards: list[Shard], split: str) -> Iterator[ScoredDocument]:
    """The documents of one split."""
    found = (document for shard in shards for document in read_shard(shard.path, shard.identity))
    yield from tqdm((document for document in found if document.split == split), desc=split)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, choices=sorted(MODELS))
    parser.add_argument("--teacher", required=True, type=Path, action="append", metavar="FOLDER")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, else float32")
    arguments = parser.parse_args()
    model, _ = load(arguments.target, dtype=getattr(torch, arguments.dtype) if arguments.dtype else None)
    target_id = MODELS[arguments.target].hub_id
    started = time.perf_counter()
    try:
        shards = shards_of(arguments.teacher, model)
        heads = train(model, documents(shards, "train"), target_id=target_id)
        heads.save_pretrained(arguments.out)
        seconds = time.perf_counter() - started
        print(f"{heads.training['summary']}; {seconds:.0f} s; strengths {heads.training['strengths']}", flush=True)
        found = agreement(model, heads, documents(shards, "held_out"))
    except ProxyKVError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(describe(found))
    print(json.dumps({"target": target_id, "training": heads.training, "held_out": found}))


if __name__ == "__main__":
    main()
