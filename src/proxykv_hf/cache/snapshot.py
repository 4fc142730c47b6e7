"""A cache on disk: one safetensors file with metadata in its header, which is written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..attention.functions import attention_modules
from ..errors import CacheStateError, ProxyKVWarning
from ..geometry import ModelGeometry, are_other_weights, check_geometry, device_of, weights_fingerprint
from .kept import Kept
from .layers import PrunedLayer, new_layers
from .prompt import Prompt
from .report import Usage
from .retention import RetentionPolicy
from .storage import DenseStorage, RaggedBlock, RaggedStorage

FILE_NAME = "cache.safetensors"
FORMAT = 1


@dataclass(frozen=True)
class Snapshot:
    """The content of a cache's file.

    Args:
        layers: The cache's layers: all filled, or all empty in the file of an empty cache.
        kept: What is kept of the prompt. None in the file of an empty cache; such files are read but no longer written.
        policy: The cache's policy.
        options: The cache's arguments ``context``, ``strict``, ``timeout`` and ``schedule``.
        usage: What the cache has used. Peaks are not written.
    """

    layers: list[Any]
    kept: Kept | None
    policy: RetentionPolicy
    options: dict[str, Any]
    usage: Usage


def write_snapshot(snapshot: Snapshot, folder: Path, target: PreTrainedModel) -> None:
    """Write the file into ``folder``. An older file is replaced once the new one is complete."""
    kept = snapshot.kept
    assert kept is not None
    tensors: dict[str, Tensor] = {"rows": kept.rows}
    layers: list[dict[str, Any]] = []
    if kept.packed is not None:
        tensors["kept"] = kept.packed
    if kept.prompt.order is not None:
        tensors["order"] = kept.prompt.order
    for index, layer in enumerate(snapshot.layers):
        if not isinstance(layer, PrunedLayer):
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
        "geometry": kept.geometry.to_dict(),
        "weights": weights_fingerprint(target),
        "dtype": str(target.dtype),
        "policy": snapshot.policy.to_dict(),
        "prompt": dataclasses.asdict(dataclasses.replace(kept.prompt, order=None)),
        **snapshot.options,
        "seconds": snapshot.usage.seconds,
        "devices": snapshot.usage.devices,
        "fallback": snapshot.usage.fallback,
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


def read_snapshot(folder: Path, target: PreTrainedModel) -> Snapshot:
    """Read what `write_snapshot` wrote, onto the devices of the target's layers and in the target's dtype.

    If the cache was made by other weights of the same geometry, a `ProxyKVWarning` says so.

    Raises:
        FileNotFoundError: ``folder`` holds no cache.
        CacheStateError: The file is damaged, or has another format.
        GeometryError: The cache was made by a model of another geometry.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"expected a folder that holds {FILE_NAME}, as cache.save(folder) writes it, got {folder}"
        )
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("proxykv", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, json.JSONDecodeError) as error:
        raise CacheStateError(
            f"expected a whole safetensors file, but {path} is damaged ({error}): save the cache again"
        ) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else None
        raise CacheStateError(f"expected a saved cache of format {FORMAT}, got {found!r} in {path}: save it again")
    saved, own = (
        ModelGeometry.from_dict(header["geometry"]),
        ModelGeometry.from_config(target.config, may_be_bounded=True),
    )
    check_geometry(own, saved, f"the cache in {folder} was made by another model")
    if are_other_weights(target, header["weights"]):
        warnings.warn(
            f"the cache in {folder} was made by other weights of the same geometry (another fine-tune or "
            "quantization): answers may be worse",
            ProxyKVWarning,
            stacklevel=3,
        )
    try:
        _move(tensors, header, target)
        return Snapshot(
            layers=[
                _layer(index, empty, entry, tensors)
                for index, (empty, entry) in enumerate(zip(new_layers(own), header["layers"], strict=True))
            ],
            kept=_kept(header["prompt"], tensors, own),
            policy=RetentionPolicy(**header["policy"]),
            options={name: header[name] for name in ("context", "strict", "timeout", "schedule")},
            usage=Usage(header["devices"], header["seconds"], fallback=header["fallback"]),
        )
    except KeyError as error:
        raise CacheStateError(f"{path} lacks {error}, which format {FORMAT} has: save the cache again") from error
    except TypeError as error:  # a field of the policy that this version does not know, say
        raise CacheStateError(
            f"expected what this version knows of format {FORMAT} in {path}, got more ({error}): load it with the "
            "version of proxykv-hf that saved it"
        ) from error


def _move(tensors: dict[str, Tensor], header: dict[str, Any], target: PreTrainedModel) -> None:
    """Move each layer's K and V to the device of the target's layer, and to the target's dtype if the file differs."""
    dtype = target.dtype if header["dtype"] != str(target.dtype) else None
    devices = {str(module.layer_idx): device_of(module) for module in attention_modules(target)}
    elsewhere = device_of(target)
    for name, tensor in tensors.items():
        layer, _, what = name.partition(".")
        if what.endswith(("keys", "values")):
            tensors[name] = tensor.to(devices.get(layer, elsewhere), dtype)


def _kept(prompt: dict[str, Any] | None, tensors: dict[str, Tensor], geometry: ModelGeometry) -> Kept | None:
    if prompt is None:
        return None
    return Kept(
        Prompt(
            columns=prompt["columns"],
            lengths=tuple(prompt["lengths"]),
            contexts=tuple((start, stop) for start, stop in prompt["contexts"]),
            next_positions=tuple(prompt["next_positions"]),
            input_ids=None,
            order=tensors.get("order"),
        ),
        tensors["rows"],
        geometry,
        tensors.get("kept"),
    )


def _layer(index: int, empty: Any, entry: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    if entry["kind"] == "empty":
        return empty
    keys, values = tensors[f"{index}.keys"], tensors[f"{index}.values"]
    if entry["kind"] == "sliding":
        empty.lazy_initialization(keys, values)
        empty.keys, empty.values, empty.cumulative_length = keys, values, entry["seen"]
        return empty
    storage: DenseStorage | RaggedStorage = DenseStorage(keys, values)
    if entry["kind"] == "ragged":
        lengths = tuple(tuple(row) for row in entry["lengths"])
        block = RaggedBlock(tensors[f"{index}.block_keys"], tensors[f"{index}.block_values"], lengths)
        storage = RaggedStorage(block, tensors[f"{index}.rows"], DenseStorage(keys, values))
    return PrunedLayer(index, storage, entry["offset"], entry["fixed"])
