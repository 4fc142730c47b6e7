"""A teacher's scores on disk: safetensors shards of a few documents each, and a manifest with their digests.

A shard holds ``doc-000012.input_ids``, int32 `[P + N]`, and ``doc-000012.scores``, float16 `[L, H, N]`, for each
document. Its header says, as JSON, what it was made from. ``manifest.json`` says the same for the whole folder, and has
the SHA-256 of each shard. An unfinished shard is a ``.partial`` file, which is rewritten with every document. When it
is complete, it is renamed and entered in the manifest. Every file is written atomically.

Several processes may fill one folder, each with its own shards. A process makes the manifest from the shards in the
folder, and writes it again until it agrees with them, so it is correct after the last process has written it.
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
        name: The document's name, which is unique in the folder.
        input_ids: `[P + N]`, int32: P tokens of the chat template, then the N tokens of the document.
        scores: `[L, H, N]`, float16, of the document; scores below 6e-8 are 0.
        kind: The kind of document; see `corpus.Document`.
        sources: The files that the text was taken from.
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
        """P, the number of tokens before the document."""
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
        folder: A folder that ``proxykv teacher`` wrote, or is writing.
        geometry: The geometry of the target that the scores must be of; None for any.
        weights: The `weights_fingerprint` of the target that the scores must be of; None for any.
        score_recipe: The recipe that the scores must be of, such as `reconstruction.RECIPE`; None for any.

    Raises:
        FileNotFoundError: There is no manifest. This is raised at once.
        ShardError: The scores are of another target or recipe, which is raised at once; or a shard is missing, cut
            short or altered, which is raised when this shard is reached.
    """
    shards = checked_shards(folder, geometry=geometry, weights=weights, score_recipe=score_recipe)
    return (document for shard in shards for document in read_shard(shard.path, shard.identity))


@dataclass(frozen=True)
class Shard:
    """A finished shard, as the manifest lists it.

    Args:
        path: The shard's file.
        sha256: The SHA-256 of the file.
        identity: What the shard was made from.
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
    """The finished shards, in order. Arguments and errors are those of `load_shards`."""
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
    """Read the manifest of a folder.

    Raises:
        FileNotFoundError: There is no manifest.
        ShardError: The manifest is not JSON, damaged, or of another format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            f"expected a folder of teacher shards with a {MANIFEST}, as `proxykv teacher` writes it: {folder}"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ShardError(f"{path} is not JSON ({error}): delete it and run the teacher again") from error
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
    """Read the documents of a shard.

    Args:
        path: The file of a finished or a partial shard.
        identity: What the shard must have been made from.

    Raises:
        ShardError: The file is cut short, not a shard, or made from something else.
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
    """Read what a shard's header says about each document, by name: ``kind``, ``sources``, ``split``, ``tokens``, ….

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
    """The SHA-256 of each document's tokens, which does not depend on its name. The scores are not read.

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
    return ShardError(f"{path} is not a complete shard ({error}): delete it, and the teacher makes its documents again")


class ShardFolder:
    """A folder that shards are written to.

    Args:
        folder: The folder; created if missing.
        identity: What the shards are made from, as values for JSON; the manifest says the same.

    Raises:
        ShardError: The folder holds shards made from something else, or a shard that is cut short or altered.
    """

    def __init__(self, folder: str | Path, identity: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.identity = plain({"format": FORMAT} | identity)
        self._entries: dict[
            tuple[str, int, int], dict[str, Any]
        ] = {}  # manifest entries, by file name, size and modification time
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / MANIFEST).is_file():
            manifest = read_manifest(self.folder)
            refuse_difference(self.folder, self.identity, manifest)
            for entry in manifest["shards"]:
                with contextlib.suppress(
                    FileNotFoundError
                ):  # a missing shard is made again, or another process adds to it
                    refuse_altered(self.folder / entry["file"], entry["sha256"])
        self._write_manifest()

    def begun(self, shard: int, wanted: int) -> list[ScoredDocument]:
        """The documents that a shard has. A finished shard with fewer than ``wanted`` becomes a partial one again."""
        path, partial = self._path(shard), self._path(shard, partial=True)
        if path.is_file():
            documents = read_shard(path, self.identity)
            if len(documents) < wanted:
                os.replace(path, partial)
                self._write_manifest()
            return documents
        return read_shard(partial, self.identity) if partial.is_file() else []

    def keep(self, shard: int, documents: Sequence[ScoredDocument]) -> None:
        """Write all documents that a partial shard has so far."""
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
        # Only one entry of metadata: safetensors writes several in any order, and equal shards must be equal files.
        header = json.dumps(self.identity | {"documents": entries})
        write_whole(self._path(shard, partial=True), save(tensors, metadata={"proxykv": header}))

    def is_finished(self, shard: int) -> bool:
        return self._path(shard).is_file()

    def finish(self, shard: int) -> None:
        """Rename a partial shard that is complete, and enter it in the manifest."""
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
        """The manifest's entries of the finished shards; another process may make one partial again meanwhile."""
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
    """A value as JSON gives it back: with lists in place of tuples."""
    return json.loads(json.dumps(value))


def refuse_altered(path: Path, sha256: str) -> None:
    """Raise `ShardError` unless the file has this SHA-256."""
    if (found := _sha256(path)) != sha256:
        raise ShardError(
            f"{path} is cut short or altered: expected sha256 {sha256}, got {found}. Delete it, and the teacher makes "
            "its documents again"
        )


def refuse_difference(where: Path, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Raise `ShardError`, which names every difference, unless ``found`` has everything that is expected."""
    different = list(differences(expected, found))
    if different:
        raise ShardError(
            f"{where} was made from something else: {'; '.join(different)}. Give what it was made from, or use "
            "another folder"
        )


def differences(expected: dict[str, Any], found: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Say in words, for each key that differs, what is expected and what was found."""
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
