"""The data of training: documents from folders of shards, whose features and log scores are read on access."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from torch.utils.data import Dataset

from ..attention.reconstruction import RECIPE
from ..errors import InvalidInputError, ShardError
from ..geometry import ModelGeometry
from .feature_cache import feature_path, read_features
from .shards import Shard, checked_shards, document_digests, read_entries

#: Smaller scores are raised to this before the logarithm. (The smallest positive float16 is 6e-8.)
SCORE_FLOOR = 1e-7
#: Bytes of documents that a dataset keeps in memory.
IN_MEMORY = 2 << 30
#: If no shard holds held-out documents, one document in this many is held out.
HELD_OUT_EVERY = 5
LEAST_DOCUMENTS = 5


@dataclass(frozen=True)
class Place:
    """Where a document is stored.

    Args:
        name: The document's folder and name, which is unique.
        kind: The kind of document; see `corpus.Document`.
        split: ``"train"`` or ``"held_out"``.
        tokens: N, the number of tokens.
        shard: The file of the document's scores.
        features: The file of the document's features.
        entry: The document's name in both files.
    """

    name: str
    kind: str
    split: str
    tokens: int
    shard: Path
    features: Path
    entry: str


@dataclass(frozen=True)
class TrainingDocument:
    """A document with its features and scores.

    Args:
        name: See `Place`.
        kind: See `Place`.
        split: See `Place`.
        features: `[C, N]`, float16.
        scores: `[L, H, N]`, float32: natural logarithms of the scores, of the full-attention layers only.
    """

    name: str
    kind: str
    split: str
    features: Tensor
    scores: Tensor


class FeatureDataset(Dataset[TrainingDocument]):
    """Documents by number, in the given order.

    A document that is read stays in memory while there is room within ``memory`` bytes; the others are read from disk
    each time. (To keep the last documents used instead would not help: every epoch has another order.)

    Args:
        places: The documents.
        geometry: The target's geometry.
        memory: Bytes of documents that may stay in memory; 0 for none.
    """

    def __init__(self, places: Sequence[Place], geometry: ModelGeometry, memory: int = IN_MEMORY) -> None:
        self.places = list(places)
        self.geometry = geometry
        self._room = memory
        self._kept: dict[int, TrainingDocument] = {}

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> TrainingDocument:
        if index not in self._kept:
            document = self._read(self.places[index])
            size = document.features.nbytes + document.scores.nbytes
            if size > self._room:
                return document
            self._room -= size
            self._kept[index] = document
        return self._kept[index]

    @property
    def tokens(self) -> int:
        """The number of tokens of all documents."""
        return sum(place.tokens for place in self.places)

    def _read(self, place: Place) -> TrainingDocument:
        with safe_open(place.shard, framework="pt") as file:
            scores: Tensor = file.get_tensor(f"{place.entry}.scores")
        features = read_features(place.features, place.entry)
        if features.shape[1] != scores.shape[2]:
            raise ShardError(
                f"{place.features}: expected features of the {scores.shape[2]} tokens of {place.entry}, got "
                f"{features.shape[1]}: delete it, and they are made again"
            )
        full = scores[list(self.geometry.full_layers)].float().clamp(min=SCORE_FLOOR).log()
        return TrainingDocument(place.name, place.kind, place.split, features, full)


def taught_shards(folders: Sequence[str | Path], geometry: ModelGeometry, weights: str | None = None) -> list[Shard]:
    """The finished shards of all folders, in the given order. All must be of one target.

    Args:
        folders: Folders that ``proxykv teacher`` wrote; ``~`` is the home folder.
        geometry: The target's geometry.
        weights: The target's `weights_fingerprint`; None for that of the first folder.

    Raises:
        InvalidInputError: No shard is finished, or a document is in two folders: it would be trained on twice, or both
            trained on and held out.
        ShardError: A shard is damaged, or not of this target.
        FileNotFoundError: A folder has no manifest of shards.
    """
    found: list[Shard] = []
    owners: dict[str, str | Path] = {}
    for folder in folders:
        own = list(checked_shards(Path(folder).expanduser(), geometry=geometry, weights=weights, score_recipe=RECIPE))
        digests = {digest for shard in own for digest in document_digests(shard.path, shard.identity)}
        if twice := digests & owners.keys():
            others = ", ".join(sorted({str(owners[digest]) for digest in twice}))
            raise InvalidInputError(
                f"expected each document in one folder only, but {len(twice)} of {folder} are in {others} too: leave "
                "one of these folders out"
            )
        owners |= dict.fromkeys(digests, folder)
        found += own
        if found:
            weights = found[0].identity["target"]["weights"]
    if not found:
        raise InvalidInputError(
            f"expected scored documents, but no shard is finished in {', '.join(map(str, folders))}: run "
            "`proxykv teacher`"
        )
    return found


def places_of(shards: Sequence[Shard], identity: dict[str, Any]) -> list[Place]:
    """All documents of some shards.

    Args:
        shards: Shards of one or several folders.
        identity: The identity of the documents' features; see `FeatureMaker.identity`.
    """
    return [
        Place(
            name=f"{shard.path.parent}/{name}",
            kind=entry["kind"],
            split=entry["split"],
            tokens=entry["tokens"],
            shard=shard.path,
            features=feature_path(shard, identity),
            entry=name,
        )
        for shard in shards
        for name, entry in read_entries(shard.path, shard.identity).items()
    ]


def split(places: Sequence[Place]) -> tuple[list[Place], list[Place]]:
    """Split documents into those for training and those that are held out.

    The shards say which documents are held out. If they say so of none, every fifth document is held out, in the given
    order, so the split does not depend on the names or places of the folders.

    Raises:
        InvalidInputError: There are fewer than five documents, or all are held out.
    """
    held_out = [place for place in places if place.split == "held_out"] or list(places[::HELD_OUT_EVERY])
    names = {place.name for place in held_out}
    training = [place for place in places if place.name not in names]
    if len(places) < LEAST_DOCUMENTS or not training:
        raise InvalidInputError(
            f"expected at least {LEAST_DOCUMENTS} documents, not all held out, got {len(training)} for training and "
            f"{len(held_out)} held out: run `proxykv teacher` for more"
        )
    return training, held_out
