"""A teacher's scores on disk: safetensors shards of some documents each, and a manifest that vouches for them.

A shard holds ``doc-000012.input_ids`` int32 `[P + N]` and ``doc-000012.scores`` float16 `[L, H, N]` of each
document, and in its header, as JSON, what it was made from. ``manifest.json`` says the same for the whole
folder, and each shard's SHA-256. A shard that grows is a ``.partial`` file, rewritten with every document;
it takes its name, and its place in the manifest, when it is whole. Every file appears whole or not at all.

Several processes may fill one folder, each its own shards. The manifest is made from the shards that are
there, and written again until it is what they say: so the last one to write leaves it right.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import ShardError
from ..files import write_whole
from ..geometry import ModelGeometry

FORMAT = 1
MANIFEST = "manifest.json"
DOCUMENTS_PER_SHARD = 8


@dataclass(frozen=True)
class ScoredDocument:
    """A document and the teacher's scores of it.

    Args:
        name: Unlike any other's in the folder.
        input_ids: `[P + N]`, int32: the chat template's part before the text, then the document.
        scores: `[L, H, N]`, float16, of the document; below 6e-8 they are 0.
        kind: As `corpus.Document` has it.
        sources: The files of its text.
        split: ``"train"`` or ``"held_out"``.
    """

    name: str
    input_ids: Tensor
    scores: Tensor
    kind: str
    sources: tuple[str, ...]
    split: str

    @property
    def prefix_tokens(self) -> int:
        """P."""
        return len(self.input_ids) - self.scores.shape[-1]


def load_shards(
    folder: str | Path,
    *,
    geometry: ModelGeometry | None = None,
    weights: str | None = None,
    score_recipe: str | None = None,
) -> Iterator[ScoredDocument]:
    """The documents of all finished shards, in order.

    Args:
        folder: What ``proxykv teacher`` wrote, or is writing.
        geometry: The target's, where the scores must fit one.
        weights: The target's `weights_fingerprint`, likewise.
        score_recipe: `reconstruction.RECIPE`, likewise.

    Raises:
        FileNotFoundError: There is no manifest; at once.
        ShardError: Scores of another target or recipe, at once; or, when its turn comes, a shard that is
            missing, cut short or altered.
    """
    shards = checked_shards(folder, geometry=geometry, weights=weights, score_recipe=score_recipe)
    return (document for shard in shards for document in read_shard(shard.path, shard.identity))


@dataclass(frozen=True)
class Shard:
    """A finished shard, as the manifest has it.

    Args:
        path: Its file.
        sha256: Of the file.
        identity: What it was made from.
    """

    path: Path
    sha256: str
    identity: dict[str, Any]


def checked_shards(
    folder: str | Path,
    *,
    geometry: ModelGeometry | None = None,
    weights: str | None = None,
    score_recipe: str | None = None,
) -> Iterator[Shard]:
    """The finished shards, in order; arguments and errors are those of `load_shards`."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    expected = {
        "target.geometry": None if geometry is None else plain(geometry.to_dict()),
        "target.weights": weights,
        "score_recipe": score_recipe,
    }
    found = {
        "target.geometry": manifest["target"]["geometry"],
        "target.weights": manifest["target"]["weights"],
        "score_recipe": manifest["score_recipe"],
    }
    refuse_difference(folder, {key: value for key, value in expected.items() if value is not None}, found)
    return _shards(folder, manifest)


def _shards(folder: Path, manifest: dict[str, Any]) -> Iterator[Shard]:
    identity = {key: value for key, value in manifest.items() if key != "shards"}
    for entry in manifest["shards"]:
        path = folder / entry["file"]
        if not path.is_file():
            raise ShardError(f"{path} is missing, though {MANIFEST} lists it: run the teacher again")
        refuse_altered(path, entry["sha256"])
        yield Shard(path, entry["sha256"], identity)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
        FileNotFoundError: There is none.
        ShardError: It is none, damaged, or of another format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            f"expected a folder of teacher shards with a {MANIFEST}, as `proxykv teacher` writes it: {folder}"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ShardError(f"{path} is no JSON ({error}): delete it and run the teacher again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise ShardError(f"expected shards of format {FORMAT}, got {found!r} in {path}: score into another folder")
    if missing := {"target", "score_recipe", "corpus", "shards"} - set(manifest):
        raise ShardError(f"{path} lacks {', '.join(sorted(missing))}: delete it and run the teacher again")
    target, shards = manifest["target"], manifest["shards"]
    parts = {
        "target": isinstance(target, dict) and {"id", "geometry", "weights", "dtype"} <= set(target),
        "corpus": isinstance(manifest["corpus"], dict),
        "shards": isinstance(shards, list)
        and all(isinstance(entry, dict) and {"file", "sha256"} <= set(entry) for entry in shards)
        and all(isinstance(entry["file"], str) for entry in shards),
    }
    if damaged := [name for name, whole in parts.items() if not whole]:
        raise ShardError(f"{path} is damaged in {', '.join(damaged)}: delete it and run the teacher again")
    return manifest


def read_shard(path: Path, identity: dict[str, Any]) -> list[ScoredDocument]:
    """The documents of a shard.

    Args:
        path: A finished or a partial one.
        identity: What it must have been made from.

    Raises:
        ShardError: It is cut short, no shard, or made from something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        return [
            ScoredDocument(
                name,
                tensors[f"{name}.input_ids"],
                tensors[f"{name}.scores"],
                entry["kind"],
                tuple(entry["sources"]),
                entry["split"],
            )
            for name, entry in read_entries(path, identity).items()
        ]
    except (SafetensorError, KeyError, TypeError) as error:
        raise _no_shard(path, error) from error


def read_entries(path: Path, identity: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a shard's header says of each document, by name: ``kind``, ``sources``, ``split``, ``tokens``, ….

    Arguments and errors are those of `read_shard`.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()["proxykv"])
        entries: dict[str, dict[str, Any]] = header.pop("documents")
    except (SafetensorError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise _no_shard(path, error) from error
    refuse_difference(path, identity, header)
    return entries


def document_digests(path: Path, identity: dict[str, Any]) -> set[str]:
    """SHA-256 of each document's tokens, whatever it is called; the scores are not read.

    Arguments and errors are those of `read_shard`.
    """
    names = read_entries(path, identity)
    try:
        with safe_open(path, framework="pt") as file:
            tokens = [file.get_tensor(f"{name}.input_ids") for name in names]
    except SafetensorError as error:
        raise _no_shard(path, error) from error
    return {hashlib.sha256(ids.numpy().tobytes()).hexdigest() for ids in tokens}


def _no_shard(path: Path, error: Exception) -> ShardError:
    return ShardError(f"{path} is no whole shard ({error}): delete it, and the teacher makes its documents again")


class ShardFolder:
    """A folder that is being filled.

    Args:
        folder: Made where missing.
        identity: What the shards are made from, as the manifest says it, for JSON.

    Raises:
        ShardError: It holds shards made from something else, or one that is cut short or altered.
    """

    def __init__(self, folder: str | Path, identity: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.identity = plain({"format": FORMAT} | identity)
        self._entries: dict[tuple[str, int, int], dict[str, Any]] = {}  # of shards seen, by name, size and time
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / MANIFEST).is_file():
            manifest = read_manifest(self.folder)
            refuse_difference(self.folder, self.identity, manifest)
            for entry in manifest["shards"]:
                with contextlib.suppress(FileNotFoundError):  # one that is gone is made again, or grows elsewhere
                    refuse_altered(self.folder / entry["file"], entry["sha256"])
        self._write_manifest()

    def begun(self, shard: int, wanted: int) -> list[ScoredDocument]:
        """The documents that a shard has; if it is finished with fewer than ``wanted``, it grows on."""
        path, partial = self._path(shard), self._path(shard, partial=True)
        if path.is_file():
            documents = read_shard(path, self.identity)
            if len(documents) < wanted:
                os.replace(path, partial)
                self._write_manifest()
            return documents
        return read_shard(partial, self.identity) if partial.is_file() else []

    def keep(self, shard: int, documents: Sequence[ScoredDocument]) -> None:
        """Write all documents that a growing shard has so far."""
        tensors: dict[str, Tensor] = {}
        entries = {}
        for document in documents:
            tensors[f"{document.name}.input_ids"] = document.input_ids
            tensors[f"{document.name}.scores"] = document.scores
            entries[document.name] = {
                "kind": document.kind,
                "sources": list(document.sources),
                "split": document.split,
                "prefix_tokens": document.prefix_tokens,
                "tokens": document.scores.shape[-1],
            }
        # One entry of metadata: safetensors writes several in any order, and equal shards are to be equal files.
        header = json.dumps(self.identity | {"documents": entries})
        write_whole(self._path(shard, partial=True), save(tensors, metadata={"proxykv": header}))

    def is_finished(self, shard: int) -> bool:
        return self._path(shard).is_file()

    def finish(self, shard: int) -> None:
        """A growing shard is whole: it takes its name, and its place in the manifest."""
        os.replace(self._path(shard, partial=True), self._path(shard))
        self._write_manifest()

    def _path(self, shard: int, partial: bool = False) -> Path:
        return self.folder / f"shard-{shard:05d}.{'partial' if partial else 'safetensors'}"

    def _write_manifest(self) -> None:
        path = self.folder / MANIFEST
        while True:
            text = json.dumps(self.identity | {"shards": self._shards()}, indent=1) + "\n"
            if path.is_file() and path.read_text(encoding="utf-8") == text:
                return
            write_whole(path, text.encode())

    def _shards(self) -> list[dict[str, Any]]:
        """The manifest's entry of each finished shard; another process may begin to grow one meanwhile."""
        shards = []
        for path in sorted(self.folder.glob("shard-*.safetensors")):
            with contextlib.suppress(FileNotFoundError):
                shards.append(self._entry(path))
        return shards

    def _entry(self, path: Path) -> dict[str, Any]:
        stat = path.stat()
        key = (path.name, stat.st_size, stat.st_mtime_ns)
        if key not in self._entries:
            documents = read_shard(path, self.identity)
            self._entries[key] = {
                "file": path.name,
                "sha256": _sha256(path),
                "documents": {document.name: document.scores.shape[-1] for document in documents},
            }
        return self._entries[key]


def plain(value: Any) -> Any:
    """As it comes back from JSON: tuples are lists."""
    return json.loads(json.dumps(value))


def refuse_altered(path: Path, sha256: str) -> None:
    """Raise `ShardError` unless the file's digest is this."""
    if (found := _sha256(path)) != sha256:
        raise ShardError(
            f"{path} is cut short or altered: expected sha256 {sha256}, got {found}. Delete it, and the teacher makes "
            "its documents again"
        )


def refuse_difference(where: Path, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Raise `ShardError`, naming all that differs, unless ``found`` has all that is expected."""
    different = list(differences(expected, found))
    if different:
        raise ShardError(
            f"{where} was made from something else: {'; '.join(different)}. Give what it was made from, or another "
            "folder"
        )


def differences(expected: dict[str, Any], found: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """In words, each key under which ``found`` has not what is expected."""
    for key, value in expected.items():
        other = found.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from differences(value, other, f"{prefix}{key}.")
            extra = sorted(set(other) - set(value))
            if extra:
                yield f"{prefix}{key}: expected no {', '.join(extra)}"
        elif value != other:
            yield f"{prefix}{key}: expected {value!r}, got {other!r}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
