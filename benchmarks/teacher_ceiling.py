"""Measure how well the teacher agrees with itself if its prompt is reworded: about the most a mapper can reach.

    python benchmarks/teacher_ceiling.py --target qwen2.5-coder-1.5b --teacher FOLDER --documents 6 --dtype bfloat16 \
        --out ceiling.jsonl

For KVzip's scores, the target is prompted to repeat its context. Each document of a folder of shards is prefilled once
and scored twice: with the prompts of the recipe, and with the same request in other words (``OTHER_PROMPTS``). Scores
are compared as a mapper's are compared with the teacher's: by the share of the Top-K that they have in common, within
heads and over all heads. ``wording`` compares the two scores with each other. ``stored`` compares the first with the
scores in the shards, which differ only by the dtype in which the teacher ran. Each document becomes a line of ``--out``
as soon as it is done, and a run that is started again continues after the last one. At the end the means over documents
are printed as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from models import load

from proxykv_hf import KVzipScorer, ModelGeometry, ProxyPrunedCache, RetentionPolicy
from proxykv_hf.attention.reconstruction import RECIPE
from proxykv_hf.commands.models import DTYPES
from proxykv_hf.geometry import weights_fingerprint
from proxykv_hf.training.dataset import SCORE_FLOOR
from proxykv_hf.training.metrics import mean_metrics, measure
from proxykv_hf.training.shards import ScoredDocument, load_shards

#: The request in other words, for the first chunk and for later ones; compare `reconstruction.PROMPTS`.
OTHER_PROMPTS = (
    "\n\nWrite out the text above once more, word for word.",
    "\n\nWrite out this section of the text above once more, word for word, beginning with",
)
#: The comparisons: two wordings of the prompts; and the stored scores, which differ only by the dtype.
WORDING, STORED = "wording", "stored"


def log_scores(scores: Tensor) -> Tensor:
    """Log scores as training reads them from shards: rounded to float16, then natural logarithms."""
    return scores.half().float().clamp(min=SCORE_FLOOR).log()


def compare(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, document: ScoredDocument
) -> dict[str, dict[str, float]]:
    """The agreement metrics of one document, for each comparison."""
    ids, start = document.input_ids.long(), document.prefix_tokens
    scorers = {"recipe": KVzipScorer(tokenizer), "otherwise": KVzipScorer(tokenizer, prompts=OTHER_PROMPTS)}
    with ProxyPrunedCache(model, None, RetentionPolicy(1.0), strict=True) as cache:
        found = cache.prefill(ids[None], context=(start, len(ids)), prune=False, scorers=scorers)
    full = list(ModelGeometry.from_config(model.config).full_layers)
    recipe, otherwise = (log_scores(found[name][0, full, :, start:].cpu()) for name in scorers)
    stored = log_scores(document.scores[full])
    return {WORDING: measure(otherwise, recipe), STORED: measure(recipe, stored)}


def means(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The means over documents, with equal weights."""
    found = {name: mean_metrics([row[name] for row in rows]) for name in (WORDING, STORED)}
    rounded = {name: {key: round(value, 4) for key, value in metrics.items()} for name, metrics in found.items()}
    return {"documents": len(rows), "tokens": sum(row["tokens"] for row in rows)} | rounded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen2.5-coder-1.5b")
    parser.add_argument("--teacher", type=Path, required=True, help="a folder that `proxykv teacher` wrote")
    parser.add_argument(
        "--documents", type=int, default=10, help="how many of its documents, from the first on (default: 10)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the target (default: float32)")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.is_file() else []
    run = {"teacher": arguments.teacher.name, "dtype": arguments.dtype, "prompts": list(OTHER_PROMPTS)}
    if any(row["run"] != run for row in rows):
        parser.error(f"{arguments.out} holds documents of another run than {run}: give another --out")
    model, tokenizer = load(arguments.target, dtype=getattr(torch, arguments.dtype))
    documents = load_shards(
        arguments.teacher.expanduser(),
        geometry=ModelGeometry.from_config(model.config),
        weights=weights_fingerprint(model),
        score_recipe=RECIPE,
    )
    done = {row["document"] for row in rows}
    for document in tqdm(itertools.islice(documents, arguments.documents), total=arguments.documents, desc="documents"):
        if document.name in done:
            continue
        started = time.perf_counter()
        found = compare(model, tokenizer, document)
        row = {"run": run, "document": document.name, "kind": document.kind, "tokens": document.scores.shape[-1]}
        rows.append(row | {"seconds": round(time.perf_counter() - started, 1)} | found)
        with arguments.out.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    print(json.dumps(run | means(rows), indent=1))


if __name__ == "__main__":
    main()
