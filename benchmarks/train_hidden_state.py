"""Train the linear heads of `HiddenStateScorer` on a teacher's scores, and say how well they agree with KVzip.

    python benchmarks/train_hidden_state.py --target qwen2.5-coder-1.5b --dtype bfloat16 \
        --teacher FOLDER --teacher FOLDER --out mappers/qwen2.5-coder-hidden_state

The folders hold shards that `proxykv teacher` wrote for the target. Documents whose shards say that they are held out
are only measured on.
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

from proxykv_hf import ModelGeometry, ProxyKVError
from proxykv_hf.geometry import weights_fingerprint
from proxykv_hf.reconstruction import RECIPE
from proxykv_hf.training.hidden_state import agreement, train
from proxykv_hf.training.metrics import describe
from proxykv_hf.training.shards import ScoredDocument, load_shards


def documents(folders: list[Path], model: PreTrainedModel, split: str) -> Iterator[ScoredDocument]:
    """Those of one side, checked to be the target's."""
    geometry, weights = ModelGeometry.from_config(model.config), weights_fingerprint(model)
    for folder in folders:
        shards = load_shards(folder.expanduser(), geometry=geometry, weights=weights, score_recipe=RECIPE)
        yield from tqdm((document for document in shards if document.split == split), desc=f"{folder.name}, {split}")


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
        heads = train(model, documents(arguments.teacher, model, "train"), target_id=target_id)
        heads.save_pretrained(arguments.out)
        seconds = time.perf_counter() - started
        print(f"{heads.training['summary']}; {seconds:.0f} s; strengths {heads.training['strengths']}", flush=True)
        found = agreement(model, heads, documents(arguments.teacher, model, "held_out"))
    except ProxyKVError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(describe(found))
    print(json.dumps({"target": target_id, "training": heads.training, "held_out": found}))


if __name__ == "__main__":
    main()
