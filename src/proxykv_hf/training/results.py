"""The output of a training run: the mapper, its card, its metrics and its history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..files import write_whole
from ..proxy.card import mapper_card, operations_per_token
from ..proxy.mapper import HybridAxialMapper
from .checkpoints import Epoch
from .config import TrainingConfig
from .dataset import FeatureDataset
from .metrics import RATIOS, gain, mean_metrics, measure, prior_scores
from .ridge import Ridge, Statistics

PRIOR, RIDGE, MAPPER = "head prior", "ridge regression", "this mapper"


@torch.no_grad()
def measure_baselines(
    training: FeatureDataset, held_out: FeatureDataset, statistics: Statistics, config: TrainingConfig
) -> dict[str, dict[str, float]]:
    """The mean metrics of the baselines on the held-out documents, by name: the head prior and a ridge regression."""
    documents = [held_out[index] for index in range(len(held_out))]
    generator = torch.Generator().manual_seed(config.seed)
    blind = [prior_scores(statistics.prior, document.scores.shape[2], generator) for document in documents]
    found = {PRIOR: blind}
    if config.ridge:
        ridge = Ridge.fit((training[index] for index in range(len(training))), statistics, config.ridge)
        found[RIDGE] = [ridge.predict(document.features) for document in documents]
    return {
        name: mean_metrics([measure(ours, document.scores) for ours, document in zip(scores, documents, strict=True)])
        for name, scores in found.items()
    }


def summary(config: TrainingConfig, training: FeatureDataset) -> str:
    """A summary of the run, for the card."""
    terms = ", ".join(f"{name} {weight:g}" for name, weight in config.loss.weights.items() if weight)
    return (
        f"{len(training)} documents, {training.tokens:,} tokens; hybrid loss ({terms}), at most {config.epochs} "
        f"epochs, seed {config.seed}"
    )


def save_results(
    mapper: HybridAxialMapper,
    history: list[Epoch],
    baselines: dict[str, dict[str, float]],
    config: TrainingConfig,
    training: FeatureDataset,
    held_out: FeatureDataset,
    best: int,
) -> dict[str, Any]:
    """Write the mapper, ``README.md`` (its card), ``results.json`` and ``history.json`` into ``config.out``.

    Args:
        mapper: The mapper to save.
        history: From `loop.train`.
        baselines: From `measure_baselines`.
        config: The configuration of the run.
        training: The documents that the mapper was trained on.
        held_out: The documents that the mapper was evaluated on.
        best: The epoch of the mapper's weights, from 1.

    Returns: what ``results.json`` holds.
    """
    folder = config.folder
    mapper.save_pretrained(folder)
    found = baselines | {MAPPER: history[best - 1]["metrics"]}
    rows = {
        f"{name}, {where}": {str(ratio): values[f"{key}@{ratio}"] for ratio in RATIOS}
        for where, key in (("over all heads", "global"), ("within each head", "head"))
        for name, values in found.items()
    }
    longest = max(place.tokens for place in training.places)
    limits = (
        f"- Trained on documents of at most {longest:,} tokens. Longer texts are read in windows; how well this works "
        f"was not measured.\n{config.limits.strip()}"
    )
    card = mapper_card(
        mapper,
        title=config.title,
        folder=Path(config.out).as_posix(),
        agreement=rows,
        held_out=f"{len(held_out)}; they also chose the epoch, so the figures are a little too good",
        limits=limits,
        licence=config.licence,
    )
    write_whole(folder / "README.md", f"{card}\n".encode())
    operations = operations_per_token(mapper)
    results = {
        "title": config.title,
        "config": config.to_dict(),
        "documents": {"training": len(training), "held_out": len(held_out)},
        "tokens": {"training": training.tokens, "held_out": held_out.tokens},
        "parameters": sum(parameter.numel() for parameter in mapper.parameters()),
        "flops_per_token": 2 * operations,
        "epochs": len(history),
        "best_epoch": best,
        "seconds": round(sum(epoch["seconds"] for epoch in history), 3),
        "metrics": found,
        "gain_over_head_prior": gain(found[MAPPER], found[PRIOR]),
    }
    _write_json(folder / "results.json", results)
    _write_json(folder / "history.json", history)
    return results


def _write_json(path: Path, value: Any) -> None:
    """Write indented JSON, atomically."""
    write_whole(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())
