"""A cache on disk: one safetensors file, its metadata in the header, that appears whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..attention.functions import attention_modules
from ..errors import CacheStateError, ProxyKVWarning
from ..geometry import ModelGeometry, are_other_weights, check_geometry, device_of, weights_fingerprint
from ..scorers.base import Scorer
from .layers import PrunedLayer
from .prompt import Prompt
from .retention import RetentionPolicy
from .storage import DenseStorage, RaggedBlock, RaggedStorage

if TYPE_CHECKING:
    from .cache import ProxyPrunedCache

FILE_NAME = "cache.safetensors"
FORMAT = 1


def save_cache(cache: ProxyPrunedCache, folder: Path) -> None:
    """Write an empty or ready cache; a file of that name in ``folder`` is replaced at the end."""
    tensors: dict[str, Tensor] = {"rows": cache._rows}
    layers: list[dict[str, Any]] = []
    if cache._kept is not None:
        tensors["kept"] = cache._kept
    for index, layer in enumerate(cache.layers):
        if not layer.is_initialized:
            layers.append({"kind": "empty"})
        elif not isinstance(layer, PrunedLayer):
            layers.append({"kind": "sliding", "seen": layer.get_seq_length()})
            tensors |= {f"{index}.keys": layer.keys, f"{index}.values": layer.values}
        else:
            assert layer.storage is not None
            entry = {"kind": "dense", "offset": layer.offset, "fixed": layer.fixed}
            tensors |= {f"{index}.keys": layer.storage.keys, f"{index}.values": layer.storage.values}
            if isinstance(layer.storage, RaggedStorage):
                block = layer.storage.block
                entry |= {"kind": "ragged", "lengths": block.lengths}
                tensors |= {
                    f"{index}.block_keys": block.keys,
                    f"{index}.block_values": block.values,
                    f"{index}.rows": layer.storage.rows,
                }
            layers.append(entry)
    header = {
        "format": FORMAT,
        "geometry": cache.geometry.to_dict(),
        "weights": weights_fingerprint(cache.target),
        "dtype": str(cache.target.dtype),
        "policy": cache.policy.to_dict(),
        "prompt": None if cache._prompt is None else dataclasses.asdict(cache._prompt),
        "context": cache.context,
        "strict": cache.strict,
        "timeout": cache.timeout,
        "schedule": cache.schedule,
        "seconds": cache._seconds,
        "devices": cache._devices,
        "fallback": cache._fallback,
        "layers": layers,
    }
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{FILE_NAME}-")
    os.close(handle)
    try:
        whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(whole, temporary, metadata={"proxykv": json.dumps(header)})
        os.chmod(temporary, 0o644)
        os.replace(temporary, folder / FILE_NAME)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_cache(
    cache_class: type[ProxyPrunedCache],
    folder: Path,
    target: PreTrainedModel,
    scorer: Scorer | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> ProxyPrunedCache:
    """See `ProxyPrunedCache.load`."""
    path = folder / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(f"expected a folder that holds {FILE_NAME}, as cache.save(folder) writes it: {folder}")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("proxykv", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, json.JSONDecodeError) as error:
        raise CacheStateError(f"{path} is no whole safetensors file ({error}): save the cache again") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else None
        raise CacheStateError(f"expected a saved cache of format {FORMAT}, got {found!r} in {path}: save it again")
    saved, own = ModelGeometry.from_dict(header["geometry"]), ModelGeometry.from_config(target.config)
    check_geometry(own, saved, f"the cache in {folder} was made by another model")
    if are_other_weights(target, header["weights"]):
        warnings.warn(
            f"the cache in {folder} was made by other weights of the same geometry (another fine-tune or "
            "quantization): answers may suffer",
            ProxyKVWarning,
            stacklevel=3,
        )
    try:
        _move(tensors, header, target)
        return _rebuilt(cache_class, header, tensors, target, scorer, tokenizer)
    except (KeyError, TypeError) as error:
        raise CacheStateError(f"{path} lacks {error}, which format {FORMAT} has: save the cache again") from error


def _move(tensors: dict[str, Tensor], header: dict[str, Any], target: PreTrainedModel) -> None:
    """Put each layer's K and V where the target's layer is, and in the target's dtype if it was another's."""
    dtype = target.dtype if header["dtype"] != str(target.dtype) else None
    devices = {str(module.layer_idx): device_of(module) for module in attention_modules(target)}
    elsewhere = device_of(target)
    for name, tensor in tensors.items():
        layer, _, what = name.partition(".")
        if what.endswith(("keys", "values")):
            tensors[name] = tensor.to(devices.get(layer, elsewhere), dtype)


def _rebuilt(
    cache_class: type[ProxyPrunedCache],
    header: dict[str, Any],
    tensors: dict[str, Tensor],
    target: PreTrainedModel,
    scorer: Scorer | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> ProxyPrunedCache:
    cache = cache_class(
        target,
        scorer,
        RetentionPolicy(**header["policy"]),
        tokenizer=tokenizer,
        context=header["context"],
        strict=header["strict"],
        timeout=header["timeout"],
        schedule=header["schedule"],
    )
    cache._restore(
        layers=[_layer(index, entry, tensors, cache) for index, entry in enumerate(header["layers"])],
        prompt=_prompt(header["prompt"]),
        rows=tensors["rows"],
        kept=tensors.get("kept"),
        seconds=header["seconds"],
        devices=header["devices"],
        fallback=header["fallback"],
    )
    return cache


def _prompt(data: dict[str, Any] | None) -> Prompt | None:
    if data is None:
        return None
    return Prompt(
        columns=data["columns"],
        lengths=tuple(data["lengths"]),
        contexts=tuple((start, stop) for start, stop in data["contexts"]),
        next_positions=tuple(data["next_positions"]),
        input_ids=None,
    )


def _layer(index: int, entry: dict[str, Any], tensors: dict[str, Tensor], cache: ProxyPrunedCache) -> Any:
    layer = cache.layers[index]
    if entry["kind"] == "empty":
        return layer
    keys, values = tensors[f"{index}.keys"], tensors[f"{index}.values"]
    if entry["kind"] == "sliding":
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values, layer.cumulative_length = keys, values, entry["seen"]
        return layer
    storage: DenseStorage | RaggedStorage = DenseStorage(keys, values)
    if entry["kind"] == "ragged":
        lengths = tuple(tuple(row) for row in entry["lengths"])
        block = RaggedBlock(tensors[f"{index}.block_keys"], tensors[f"{index}.block_values"], lengths)
        storage = RaggedStorage(block, tensors[f"{index}.rows"], DenseStorage(keys, values))
    return PrunedLayer(index, storage, entry["offset"], entry["fixed"])
