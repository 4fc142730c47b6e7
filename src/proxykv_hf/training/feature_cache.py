"""The proxy's features of a teacher's documents, made once and kept beside the shards.

A folder of shards holds a folder ``features-<key>`` for each proxy and recipe, with one file for each shard, of the
same name. The file holds ``doc-000012.features``, float16 `[C, N]`, for each document, without the tokens of the chat
template. Its header says, as JSON, what the features were made from. Files are written atomically, so a run that was
stopped continues with the next shard.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import InvalidInputError, ProxyKVWarning
from ..files import write_whole
from ..geometry import weights_fingerprint
from ..proxy.features import LOG_FLOOR, NEIGHBOURHOOD, WINDOW, FeatureRecipe, proxy_features
from .shards import Shard, differences, plain, read_shard

#: Increases whenever a change of the code changes the features of a recipe.
FORMAT = 1


@dataclass(frozen=True)
class FeatureMaker:
    """A proxy and the features that are read from it.

    Args:
        proxy: A decoder without a language-model head, cut to ``recipe.proxy_layers`` layers.
        recipe: Which features are read.
        tokenizer: The proxy's tokenizer, which the source ``reconstruction`` needs.
    """

    proxy: PreTrainedModel
    recipe: FeatureRecipe
    tokenizer: PreTrainedTokenizerBase | None = None

    def identity(self) -> dict[str, Any]:
        """Everything that determines the features of given tokens, as values for JSON."""
        constants = {"neighbourhood": NEIGHBOURHOOD, "window": WINDOW, "log_floor": LOG_FLOOR}
        return {
            "format": FORMAT,
            "proxy_weights": weights_fingerprint(self.proxy),
            "proxy_dtype": str(self.proxy.dtype).removeprefix("torch."),
            "recipe": plain(self.recipe.to_dict()),
            "constants": constants,
        }


def feature_path(shard: Shard, identity: dict[str, Any]) -> Path:
    """The file of a shard's features."""
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    return shard.path.parent / f"features-{key}" / shard.path.name


def missing_features(shards: Iterable[Shard], identity: dict[str, Any]) -> list[Shard]:
    """The shards whose features are missing or must be made again.

    Features must be made again if they cannot be read, or do not fit, for example because the shard has grown. A
    `ProxyKVWarning` says why.
    """
    missing = []
    for shard in shards:
        path = feature_path(shard, identity)
        if not path.is_file():
            missing.append(shard)
        elif wrong := _wrong(path, _expected(shard, identity)):
            warnings.warn(f"{path}: {wrong}; these features are made again", ProxyKVWarning, stacklevel=2)
            missing.append(shard)
    return missing


def make_features(shards: Iterable[Shard], maker: FeatureMaker, progress: bool = True) -> None:
    """Run the proxy over the documents of some shards, and write their features.

    Args:
        shards: The shards that `missing_features` names, or this process's part of them.
        maker: The proxy and the recipe.
        progress: Show a progress bar.

    Raises:
        ShardError: A shard is damaged.
        InvalidInputError: Features are not finite, for example after an overflow in half precision; or the recipe reads
            ``reconstruction`` and there is no tokenizer.
    """
    from tqdm import tqdm

    identity = maker.identity()
    for shard in tqdm(list(shards), desc="shards through the proxy", disable=not progress):
        tensors = {}
        for document in read_shard(shard.path, shard.identity):
            ids = document.input_ids.long()
            span = (document.prefix_tokens, len(ids))
            found = proxy_features(maker.proxy, ids, maker.recipe, context=span, tokenizer=maker.tokenizer)
            features = found[:, document.prefix_tokens :].half().cpu().contiguous()
            if not features.isfinite().all():
                raise InvalidInputError(
                    f"the proxy's features of {document.name} in {shard.path} are not all finite in float16: run the "
                    "proxy in float32 or bfloat16"
                )
            tensors[f"{document.name}.features"] = features
        path = feature_path(shard, identity)
        path.parent.mkdir(exist_ok=True)
        header = json.dumps(_expected(shard, identity))
        write_whole(path, save(tensors, metadata={"proxykv": header}))


def read_features(path: Path, name: str) -> torch.Tensor:
    """Read the features of one document, `[C, N]`, float16, and nothing else of the file."""
    with safe_open(path, framework="pt") as file:
        features: torch.Tensor = file.get_tensor(f"{name}.features")
    return features


def _expected(shard: Shard, identity: dict[str, Any]) -> dict[str, Any]:
    return identity | {"shard_sha256": shard.sha256}


def _wrong(path: Path, expected: dict[str, Any]) -> str:
    """Say in words why a file is not the expected one; an empty text if it is."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()["proxykv"])
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        return f"not a complete file of features ({error})"
    return "; ".join(differences(expected, header))
