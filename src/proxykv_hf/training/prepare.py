"""Prepare the data of a training run: check models and shards, make features, split documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from ..attention.reconstruction import RECIPE
from ..errors import ShardError
from ..geometry import ModelGeometry, weights_fingerprint
from ..proxy.loading import SELF_PROXY, load_first_layers
from ..proxy.mapper import HybridAxialMapper, HybridAxialMapperConfig
from ..scorers.on_lane import check_same_tokens
from .config import TrainingConfig
from .dataset import FeatureDataset, places_of, split, taught_shards
from .feature_cache import FeatureMaker, make_features, missing_features
from .ridge import Statistics
from .shards import read_shard

#: Standard deviation of the heads' output vectors before training.
START = 0.0375


@dataclass(frozen=True)
class Source:
    """A model and its name.

    Args:
        folder: The folder or Hub id that the model is loaded from.
        name: How a mapper's config names the model: its Hub id, if it has one.
    """

    folder: str
    name: str


@dataclass(frozen=True)
class Prepared:
    """The data of a training run.

    Args:
        training: The documents to train on.
        held_out: The documents to evaluate on.
        identity: The identity of the shards, in order, and of the features, as values for JSON. Both determine the
            trained weights.
        config: The arguments of the mapper's config, without its sizes and without the record of its training.
    """

    training: FeatureDataset
    held_out: FeatureDataset
    identity: dict[str, Any]
    config: dict[str, Any]


def prepare(config: TrainingConfig, target: Source, proxy: Source | None, accelerator: Accelerator) -> Prepared:
    """Check models and shards, and make the missing features; all processes share that work.

    Args:
        config: The configuration of the run.
        target: The target M_l. It is loaded only if features are missing, to check that it is the teacher's target.
        proxy: The proxy M_s; None for the target's own first layers.
        accelerator: Determines where the proxy runs: in float32 on a CPU, in bfloat16 on a GPU.

    Raises:
        InvalidInputError: There are no shards or too few documents, a document is in two folders, or the proxy has
            other tokens than the target or too few layers.
        ShardError: A shard is damaged, or not of this target.
        FileNotFoundError: A folder has no manifest of shards.
    """
    geometry = ModelGeometry.from_config(AutoConfig.from_pretrained(target.folder))
    shards = taught_shards(config.teacher, geometry)
    taught = shards[0].identity["target"]
    small = proxy or target
    whole: PreTrainedConfig = AutoConfig.from_pretrained(small.folder)
    dtype = torch.bfloat16 if accelerator.device.type == "cuda" else torch.float32
    layers = config.features.proxy_layers
    reader = FeatureMaker(
        load_first_layers(small.folder, layers, revision=None, dtype=dtype, device=accelerator.device),
        config.features,
        AutoTokenizer.from_pretrained(small.folder),
    )
    identity = reader.identity()
    missing = missing_features(shards, identity)
    accelerator.wait_for_everyone()  # no process makes features before all have checked which are missing
    if missing:
        if accelerator.is_main_process:
            _check_weights(target, taught)
        if proxy is not None:
            theirs = AutoTokenizer.from_pretrained(target.folder)
            for shard in missing:
                ids = torch.cat([document.input_ids for document in read_shard(shard.path, shard.identity)])
                check_same_tokens(ids, reader.tokenizer or theirs, theirs)
        own = missing[accelerator.process_index :: accelerator.num_processes]
        make_features(own, reader, progress=accelerator.is_main_process)
        accelerator.wait_for_everyone()
    training, held_out = split(places_of(shards, identity))
    return Prepared(
        FeatureDataset(training, geometry),
        FeatureDataset(held_out, geometry),
        {"shards": [shard.sha256 for shard in shards], "read": identity},
        {
            "target_geometry": geometry.to_dict(),
            "proxy_geometry": ModelGeometry.from_config(whole).to_dict(),
            "target_id": taught["id"],
            "proxy_id": SELF_PROXY if proxy is None else proxy.name,
            "proxy_revision": None if proxy is None else getattr(whole, "_commit_hash", None),
            "target_weights": taught["weights"],
            "proxy_weights": identity["proxy_weights"],
            "features": config.features.to_dict(),
            "channels": config.features.channels(reader.proxy.config),
            "score_recipe": RECIPE,
        },
    )


def new_mapper(
    config: TrainingConfig, prepared: Prepared, statistics: Statistics, training: dict[str, Any]
) -> HybridAxialMapper:
    """The untrained mapper of a run; see `start_mapper`.

    Args:
        config: The configuration of the run.
        prepared: The data of the run.
        statistics: The statistics of the training documents.
        training: What the mapper's config records about its training.
    """
    settings = HybridAxialMapperConfig(**prepared.config, **config.mapper, training=training)
    return start_mapper(settings, statistics, config.seed)


def start_mapper(
    settings: HybridAxialMapperConfig,
    statistics: Statistics,
    seed: int,
    kind: type[HybridAxialMapper] = HybridAxialMapper,
) -> HybridAxialMapper:
    """An untrained mapper with random weights, whose scores are close to the head prior.

    A mapper that starts from the ridge regression learns less: the regression already fits the training documents, and
    its errors on them are not like its errors on other documents.

    Args:
        settings: The mapper's config.
        statistics: The statistics of the training documents.
        seed: The seed of the weights.
        kind: The mapper's class.
    """
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(seed)
        mapper = kind(settings)
        mapper.heads.output.normal_(std=START)
    mapper.set_channel_statistics(statistics.mean, statistics.std)
    mapper.set_head_prior(statistics.prior)
    return mapper


def _check_weights(target: Source, taught: dict[str, Any]) -> None:
    """Refuse a target with other weights than the teacher's target."""
    dtype = "auto" if taught["dtype"] is None else getattr(torch, taught["dtype"])
    found = weights_fingerprint(AutoModelForCausalLM.from_pretrained(target.folder, dtype=dtype))
    if found != taught["weights"]:
        raise ShardError(
            f"the shards were scored by {taught['id']} with weights {taught['weights']}, but {target.folder} has "
            f"{found}: give the target that `proxykv teacher` was run on"
        )
