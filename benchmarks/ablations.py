"""Measure what each part of the mapper is worth: each row of a table changes one thing of a training run.

    python benchmarks/ablations.py --out ablations.jsonl --epochs 8 --documents 49 --seeds 0 1
    python benchmarks/ablations.py --out ablations.jsonl --epochs 8 --documents 49 --rows base "loss terms" "no stem"
    python benchmarks/ablations.py --out ablations.jsonl --table

All rows of a file have the same documents, epochs and settings, except for what the row's name says. A row is measured
after its last epoch, with the averaged weights, so the held-out documents choose nothing. A row is appended to the file
as soon as it is done, and is not run again. Rows that need more features than the base run has read them from one pass
of the whole proxy, in which the proxy also repeats the context. These features are made when they are first needed,
which takes long.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ablated_mappers import LinearPathAlone, NeighbourMLP, NoEncoder, NoLinearPath, StaticHeadMap
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig

from proxykv_hf import FeatureRecipe, HybridAxialMapper, HybridAxialMapperConfig, InvalidInputError, ModelGeometry
from proxykv_hf.commands.models import DTYPES, resolve
from proxykv_hf.proxy.features import SOURCES
from proxykv_hf.proxy.loading import load_first_layers
from proxykv_hf.scorers.static_alignment import align, proportional_layers
from proxykv_hf.training.checkpoints import Checkpoints, Epoch
from proxykv_hf.training.config import TrainingConfig
from proxykv_hf.training.dataset import FeatureDataset, TrainingDocument, places_of, split, taught_shards
from proxykv_hf.training.feature_cache import FeatureMaker, make_features, missing_features
from proxykv_hf.training.loop import make_accelerator, train
from proxykv_hf.training.losses import WEIGHTS
from proxykv_hf.training.metrics import RATIOS, gain, mean_agreement, mean_metrics, measure, prior_scores
from proxykv_hf.training.prepare import start_mapper
from proxykv_hf.training.ridge import Ridge, Statistics

CONFIG = Path(__file__).resolve().parents[1] / "examples" / "train_qwen2.5-coder.toml"
#: Numbers of proxy layers on the curve, besides all layers.
CURVE = (4, 6, 8, 10, 14, 18)
#: Kinds of rows in which no mapper is trained.
RIDGE, PRIOR, STATIC = "ridge", "head prior", "static alignment"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        group: The name of a group of rows that belong together.
        name: The name of the row, which is unique.
        changes: What is changed in the base run, as in its TOML file; tables are merged.
        kind: The mapper's class; or ``RIDGE``, ``PRIOR`` or ``STATIC``, which do not depend on the seed.
        every: Only one in this many training documents is used, for this many times the epochs, so that the number of
            steps stays the same.
    """

    group: str
    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    kind: type[HybridAxialMapper] | str = HybridAxialMapper
    every: int = 1

    def config(self, base: TrainingConfig, seed: int) -> TrainingConfig:
        """The configuration of this row's run, which does not stop early."""
        epochs = base.epochs * self.every
        changes = self.changes | {"seed": seed, "epochs": epochs, "patience": epochs}
        return TrainingConfig.from_dict(merged(base.to_dict(), changes))


def table_of_rows(base: TrainingConfig, depth: int) -> list[Row]:
    """All rows, the base first, for a proxy of ``depth`` layers."""
    own = base.features.proxy_layers

    def reads(layers: int, *sources: str) -> dict[str, Any]:
        hidden = (layers == own and base.features.hidden_layers) or spread(layers)
        chosen = hidden if "hidden" in sources else ()
        return {"features": {"sources": sources, "proxy_layers": layers, "hidden_layers": chosen}}

    sizes = {
        "bottleneck": (96, 384), "head_tokens": (4, 16), "width": (32, 128), "encoder_layers": (1, 4), "window": (128,)
    }  # fmt: skip
    return [
        Row("base", "base"),
        *(Row("loss terms", f"no {term}", {"loss": {"weights": {term: 0.0}}}) for term in WEIGHTS),
        Row("stages", "no stem", {"mapper": {"kernel_size": 1}}),
        Row("stages", "no time encoder", kind=NoEncoder),
        Row("stages", "static head map for cross-attention", kind=StaticHeadMap),
        Row("stages", "no linear path", kind=NoLinearPath),
        Row("instead of the mapper", "head prior", kind=PRIOR),
        Row("instead of the mapper", f"static alignment, {depth} layers", reads(depth, "reconstruction"), STATIC),
        Row("instead of the mapper", "ridge regression", kind=RIDGE),
        Row("instead of the mapper", "linear path alone, hybrid loss", kind=LinearPathAlone),
        Row("instead of the mapper", "MLP over 3 positions", {"mapper": {"bottleneck": 128}}, NeighbourMLP),
        Row("features", f"attention, {own} layers", reads(own, "attention")),
        Row("features", f"hidden, {own} layers", reads(own, "hidden")),
        Row("features", f"reconstruction, {own} layers", reads(own, "reconstruction")),
        Row("features", f"reconstruction, {depth} layers", reads(depth, "reconstruction")),
        Row("features", f"all three, {own} layers", reads(own, *SOURCES)),
        Row("features", f"all three, {depth} layers", reads(depth, *SOURCES)),
        *(
            Row("proxy layers, ridge", f"{layers} layers", reads(layers, "attention", "hidden"), RIDGE)
            for layers in curve(depth)
        ),
        *(
            Row("sizes", f"{name} {value}", {"mapper": {name: value}})
            for name, values in sizes.items()
            for value in values
        ),
        *(
            Row("regularisation", f"{name} {value:g}", {name: value})
            for name, value in (("weight_decay", 0.0), ("weight_decay", 1.0), ("weight_decay", 5.0), ("noise", 0.0))
        ),
        Row("regularisation", "dropout 0", {"mapper": {"dropout": 0.0}}),
        Row("amount of data", "a half of the documents, as many steps", every=2),
        Row("amount of data", "a quarter of the documents, as many steps", every=4),
    ]


def curve(depth: int) -> list[int]:
    return [*(layers for layers in CURVE if layers < depth), depth]


def spread(layers: int) -> tuple[int, ...]:
    """The three layers whose hidden states are read, of ``layers`` layers: 2, 6 and 10 of 10."""
    return tuple(sorted({max(1, round(layers / 5)), max(1, round(3 * layers / 5)), layers}))


def merged(data: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A nested dict with some values replaced."""
    return data | {
        key: merged(data[key], value) if isinstance(value, dict) and key in data else value
        for key, value in changes.items()
    }


# Documents and features.


def channels_of(recipe: FeatureRecipe, whole: FeatureRecipe, proxy: PreTrainedConfig) -> Tensor | None:
    """The positions of a recipe's channels among those of ``whole``, `[C]`; None if they are not all there."""
    found, start = [], 0
    for source, size in whole.sizes(proxy).items():
        places = torch.arange(start, start + size)
        start += size
        if source not in recipe.sources:
            continue
        if source == "hidden":
            wanted = [
                whole.hidden_layers.index(layer) for layer in recipe.hidden_layers if layer in whole.hidden_layers
            ]
            found.append(places.view(len(whole.hidden_layers), -1)[wanted].flatten())
        else:  # ordered by layer, and no layer depends on a later one
            found.append(places.view(whole.proxy_layers, -1)[: recipe.proxy_layers].flatten())
    channels = torch.cat(found) if found else torch.empty(0, dtype=torch.long)
    return channels if len(channels) == recipe.channels(proxy) else None


class Narrowed(FeatureDataset):
    """Some of a dataset's documents, with some channels of their features."""

    def __init__(self, whole: FeatureDataset, every: int, channels: Tensor) -> None:
        super().__init__(whole.places[::every], whole.geometry, memory=0)
        self.whole, self.every, self.channels = whole, every, channels

    def __getitem__(self, index: int) -> TrainingDocument:
        document = self.whole[index * self.every]
        return dataclasses.replace(document, features=document.features[self.channels])


class Teacher:
    """The documents of a run, with the features of any recipe.

    Args:
        config: The configuration of the base run.
        limit: How many of the training documents are used, in the order of the folders; None for all.
        dtype: The dtype that the proxy computes in.
    """

    def __init__(self, config: TrainingConfig, limit: int | None, dtype: torch.dtype) -> None:
        self.config, self.limit, self.dtype = config, limit, dtype
        self.target: PreTrainedConfig = AutoConfig.from_pretrained(resolve(config.target))
        self.geometry = ModelGeometry.from_config(self.target)
        self.proxy_folder = resolve(config.proxy or config.target)
        self.proxy: PreTrainedConfig = AutoConfig.from_pretrained(self.proxy_folder)
        self.depth = ModelGeometry.from_config(self.proxy).num_layers
        self.shards = taught_shards(config.teacher, self.geometry)
        hidden = {layer for layers in curve(self.depth) for layer in spread(layers)} | set(
            config.features.hidden_layers
        )
        #: The run's own recipe comes first: its features are cheap, and often exist already.
        self.recipes = (config.features, FeatureRecipe(SOURCES, self.depth, tuple(hidden)))
        self._read: dict[FeatureRecipe, tuple[FeatureDataset, FeatureDataset]] = {}
        self._statistics: dict[tuple[FeatureRecipe, int], Statistics] = {}

    def documents(self, recipe: FeatureRecipe, every: int) -> tuple[FeatureDataset, FeatureDataset, Statistics]:
        """The training documents, the held-out documents, and the statistics of the training documents."""
        for whole in self.recipes:
            channels = channels_of(recipe, whole, self.proxy)
            if channels is not None:
                break
        else:
            raise InvalidInputError(f"expected features that one of {self.recipes} holds, got {recipe}")
        if whole not in self._read:
            self._read[whole] = self._make(whole)
        training, held_out = self._read[whole]
        chosen, all_held_out = Narrowed(training, every, channels), Narrowed(held_out, 1, channels)
        if (recipe, every) not in self._statistics:
            self._statistics[recipe, every] = Statistics.of(chosen[index] for index in range(len(chosen)))
        return chosen, all_held_out, self._statistics[recipe, every]

    def _make(self, recipe: FeatureRecipe) -> tuple[FeatureDataset, FeatureDataset]:
        """All documents with the features of a recipe; missing features are made."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        layers = recipe.proxy_layers
        proxy = load_first_layers(self.proxy_folder, layers, revision=None, dtype=self.dtype, device=device)
        maker = FeatureMaker(proxy, recipe, AutoTokenizer.from_pretrained(self.proxy_folder))
        identity = maker.identity()
        training, held_out = split(places_of(self.shards, identity))
        training = training[: self.limit]
        wanted = {place.shard for place in training + held_out}
        if missing := missing_features([shard for shard in self.shards if shard.path in wanted], identity):
            make_features(missing, maker)
        return FeatureDataset(training, self.geometry), FeatureDataset(held_out, self.geometry)

    def identity(self) -> str:
        """A digest of the documents and of all settings, which all rows of a table share."""
        training, held_out = split(places_of(self.shards, {}))
        training = training[: self.limit]
        digests = {shard.path: shard.sha256 for shard in self.shards}
        used = [(place.entry, digests[place.shard]) for place in training + held_out]
        run = [used, self.config.identity() | {"seed": None}, str(self.dtype)]
        return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:12]

    def cost(self, recipe: FeatureRecipe) -> float:
        """The proxy's multiply-adds with weights, as a share of those of the target's layers.

        For ``reconstruction``, the pass in which the proxy repeats the context counts too.
        """
        with torch.device("meta"):
            ours, theirs = (_weights_of_layers(AutoModel.from_config(c)) for c in (self.proxy, self.target))
        passes = 2 if "reconstruction" in recipe.sources else 1
        return passes * recipe.proxy_layers * ours / self.depth / theirs


def _weights_of_layers(decoder: Any) -> int:
    return sum(parameter.numel() for parameter in decoder.layers.parameters())


# Runs.


def measure_all(scores: Callable[[TrainingDocument], Tensor], documents: FeatureDataset) -> dict[str, float]:
    """The mean metrics of ``scores``, a function that scores a document, `[L, H, n]`."""
    all_documents = (documents[index] for index in range(len(documents)))
    return mean_metrics([measure(scores(document), document.scores) for document in all_documents])


def fresh(
    kind: type[HybridAxialMapper], config: TrainingConfig, teacher: Teacher, known: Statistics
) -> HybridAxialMapper:
    """The untrained mapper of a row."""
    settings = HybridAxialMapperConfig(
        target_geometry=teacher.geometry.to_dict(),
        proxy_geometry=ModelGeometry.from_config(teacher.proxy).to_dict(),
        features=config.features.to_dict(),
        channels=config.features.channels(teacher.proxy),
        **config.mapper,
    )
    return start_mapper(settings, known, config.seed, kind)


@torch.no_grad()
def run(row: Row, base: TrainingConfig, teacher: Teacher, seed: int) -> dict[str, Any]:
    """Train and measure one row."""
    config = row.config(base, seed)
    training, held_out, known = teacher.documents(config.features, row.every)
    generator = torch.Generator().manual_seed(0)
    blind = measure_all(lambda d: prior_scores(known.prior, d.scores.shape[2], generator), held_out)
    epochs: list[Epoch] = []
    began, own = time.perf_counter(), time.process_time()
    if row.kind == PRIOR:
        found, parameters = blind, known.prior.numel()
    elif row.kind == STATIC:
        proxy = ModelGeometry.from_config(teacher.proxy)
        layers, heads = proportional_layers(proxy, teacher.geometry), proxy.num_key_value_heads
        full = list(teacher.geometry.full_layers)

        def carried(document: TrainingDocument) -> Tensor:  # the proxy's KVzip scores, log scale
            return align(document.features.float().unflatten(0, (-1, heads)), teacher.geometry, layers)[full]

        found, parameters = measure_all(carried, held_out), 0
    elif row.kind == RIDGE:
        ridge = Ridge.fit((training[index] for index in range(len(training))), known, config.ridge)
        found, parameters = measure_all(lambda d: ridge.predict(d.features), held_out), ridge.weights.numel()
    else:
        assert isinstance(row.kind, type)
        mapper = fresh(row.kind, config, teacher, known)
        parameters = sum(parameter.numel() for parameter in mapper.parameters() if parameter.requires_grad)
        with tempfile.TemporaryDirectory() as folder:
            _, epochs = train(mapper, training, held_out, config, Checkpoints(folder, {}), make_accelerator(config))
        found = epochs[-1]["metrics"]
    return {
        "group": row.group,
        "row": row.name,
        "seed": seed,
        "documents": len(training),
        "tokens": training.tokens,
        "held_out": len(held_out),
        "epochs": len(epochs),
        "parameters": parameters,
        "cost": round(teacher.cost(config.features), 4) if row.kind != PRIOR else 0.0,
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - own, 1),
        "agreement": mean_agreement(found),
        "agreement_by_epoch": [epoch["agreement"] for epoch in epochs],
        "metrics": found,
        "gain_over_head_prior": gain(found, blind),
    }


# The table.


def table(results: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: means over seeds for each row's name, with groups in the order in which they first appear.

    The difference to the base is the mean over the seeds that the base has too.
    """
    names: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        names.setdefault(result["row"], []).append(result)
    base = {result["seed"]: result["agreement"] for result in names.get("base", [])}
    header = ["", *(f"head {ratio}" for ratio in RATIOS), *(f"global {ratio}" for ratio in RATIOS)]
    header += ["mean", "to the base", "parameters, M", "proxy, % of the target", "CPU s", "seeds"]
    lines = [" | ".join(header), " | ".join("---" for _ in header)]
    groups = list(dict.fromkeys(result["group"] for result in results))
    for group in groups:
        lines.append(" | ".join([f"**{group}**", *("" for _ in header[1:])]))
        for name, found in names.items():
            if found[0]["group"] == group:
                lines.append(" | ".join(_cells(name, found, base)))
    return "\n".join(f"| {line} |" for line in lines)


def _cells(name: str, found: list[dict[str, Any]], base: dict[int, float]) -> Iterator[str]:
    def mean(value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.fmean(value(result) for result in found)

    yield name
    for where in ("head", "global"):
        for ratio in RATIOS:
            yield f"{mean(lambda result, key=f'{where}@{ratio}': result['metrics'][key]):.3f}"  # type: ignore[misc]
    yield f"{mean(lambda result: result['agreement']):.4f}"
    paired = [result["agreement"] - base[result["seed"]] for result in found if result["seed"] in base]
    yield f"{statistics.fmean(paired):+.4f}" if paired and name != "base" else ""
    yield f"{mean(lambda result: result['parameters']) / 1e6:.2f}"
    yield f"{100 * mean(lambda result: result['cost']):.1f}"
    yield f"{mean(lambda result: result['cpu_seconds']):.0f}"
    yield ", ".join(str(result["seed"]) for result in found)


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a file of JSON lines, one for each row and seed")
    parser.add_argument("--table", action="store_true", help="only print the table of --out")
    parser.add_argument("--config", type=Path, default=CONFIG, help="the base run: a TOML file of `proxykv train`")
    parser.add_argument(
        "--teacher", nargs="+", metavar="FOLDER", help="folders of shards, held-out ones too, in place of the file's"
    )
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="names of rows or groups (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--epochs", type=int, help="epochs, in place of the file's")
    parser.add_argument(
        "--batch", type=int, help="documents per step, in place of the file's; fewer documents need a smaller batch"
    )
    parser.add_argument("--documents", type=int, help="how many of the training documents are used (default: all)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype that the proxy computes features in")
    arguments = parser.parse_args()
    results = read_results(arguments.out)
    if arguments.table:
        print(table(results))
        return
    given = {name: getattr(arguments, name) for name in ("epochs", "batch", "teacher")}
    base = TrainingConfig.read(arguments.config, **{key: value for key, value in given.items() if value is not None})
    teacher = Teacher(base, arguments.documents, getattr(torch, arguments.dtype))
    identity = teacher.identity()
    if others := {result["run"] for result in results} - {identity}:
        parser.error(f"{arguments.out} holds rows of other documents or settings ({', '.join(others)}): give another")
    rows = table_of_rows(base, teacher.depth)
    if unknown := set(arguments.rows or ()) - {name for row in rows for name in (row.name, row.group)}:
        parser.error(f"no such rows: {', '.join(sorted(unknown))}; there are {', '.join(row.name for row in rows)}")
    done = {(result["row"], result["seed"]) for result in results}
    for seed in arguments.seeds:
        for row in rows:
            wanted = not arguments.rows or row.name in arguments.rows or row.group in arguments.rows
            again = isinstance(row.kind, str) and seed != arguments.seeds[0]  # these rows do not depend on the seed
            if not wanted or again or (row.name, seed) in done:
                continue
            print(f"{row.group}: {row.name}, seed {seed}", flush=True)
            result = {"run": identity} | run(row, base, teacher, seed)
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    print(table(read_results(arguments.out)))


if __name__ == "__main__":
    main()
