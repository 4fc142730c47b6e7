"""The configuration of a training run, as a TOML file:

    title = "SmolLM2-135M, its own first layers"
    target = "HuggingFaceTB/SmolLM2-135M-Instruct"
    teacher = ["teacher/smollm2-135m"]
    out = "mappers/smollm2"

    [features]
    sources = ["attention", "hidden"]
    proxy_layers = 10
    hidden_layers = [2, 5, 8, 10]

The other keys are the other fields of `TrainingConfig`. The tables ``features``, ``mapper`` and ``loss`` are a
`FeatureRecipe`, the sizes of a `HybridAxialMapperConfig`, and a `HybridLoss`.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InvalidInputError
from ..proxy.features import FeatureRecipe
from ..proxy.mapper import HybridAxialMapperConfig
from .losses import HybridLoss

#: Fields of `HybridAxialMapperConfig` that a run may set.
SIZES = (
    "bottleneck",
    "head_tokens",
    "width",
    "kernel_size",
    "encoder_layers",
    "encoder_heads",
    "window",
    "overlap",
    "dropout",
)
#: Fields that do not change the trained weights. (The shards and their order do; where they are stored does not.)
FREE = ("title", "out", "limits", "licence", "teacher", "ridge")
#: Sizes whose default in training differs from that of `HybridAxialMapperConfig`.
DEFAULT_SIZES = {"dropout": 0.2}
LIMITS = """- For the weights named above. Other weights of the same geometry work with a warning, a little less well.
- Agreement is with KVzip, not with answers: see the repository's benchmarks for those."""


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that determines a training run.

    Args:
        title: The title of the mapper's card.
        target: The target M_l, given like the commands' ``--target``.
        teacher: Folders of shards that ``proxykv teacher`` wrote for the target. Documents are taken in this order.
        out: Folder for the mapper, its card, the results, and the checkpoints.
        features: What is read from the proxy.
        proxy: The proxy M_s, given like ``target``; None for the target's own first layers.
        mapper: Sizes of the mapper, some of ``SIZES``. The others have the defaults of `HybridAxialMapperConfig`,
            except that dropout is 0.2, since there are many channels and few documents.
        loss: The training loss.
        learning_rate: The peak learning rate.
        weight_decay: The weight decay of matrices; vectors have none.
        epochs: Passes over the documents.
        batch: Documents per step, over all processes. The number of processes must divide it.
        warm_up: Share of the steps over which the learning rate rises; it then falls to 0 as a cosine.
        ema_decay: Decay of the running mean of the weights. The mean is what is evaluated and saved; 0 makes it the
            weights themselves. In the first steps it is smaller: ``min(ema_decay, (1 + step) / (10 + step))``.
        clip_norm: The largest norm that the gradient may have.
        noise: Standard deviation of the noise that training adds to the mapper's bottleneck.
        seed: The seed of the initial weights, the order of documents, dropout, noise and sampled pairs.
        patience: Training stops after this many epochs without a better agreement.
        ridge: Strength of the ridge regression that the mapper is compared with; 0 for no comparison. The regression
            needs memory for a `[C, C]` matrix.
        limits: The limits in the mapper's card, a Markdown list; the length of the documents is added to it.
        licence: The mapper's licence, an SPDX id in lower case.

    Raises:
        InvalidInputError: On construction; the message names the argument.
    """

    title: str
    target: str
    teacher: tuple[str, ...]
    out: str
    features: FeatureRecipe
    proxy: str | None = None
    mapper: dict[str, Any] = field(default_factory=dict)
    loss: HybridLoss = field(default_factory=HybridLoss)
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.05
    epochs: int = 12
    batch: int = 1
    warm_up: float = 0.05
    ema_decay: float = 0.98
    clip_norm: float = 1.0
    noise: float = 0.1
    seed: int = 0
    patience: int = 6
    ridge: float = 0.3
    limits: str = LIMITS
    licence: str = "apache-2.0"

    def __post_init__(self) -> None:
        if isinstance(self.teacher, str):
            raise InvalidInputError(f"teacher: expected a list of folders, got {self.teacher!r}")
        object.__setattr__(self, "teacher", tuple(self.teacher))
        _refuse_unknown("mapper", self.mapper, SIZES)
        object.__setattr__(self, "mapper", DEFAULT_SIZES | self.mapper)
        HybridAxialMapperConfig(**self.mapper)  # raises if a size is invalid
        rules = {
            "title": (bool(self.title), "a title"),
            "target": (bool(self.target), "a folder or an id"),
            "teacher": (bool(self.teacher) and all(self.teacher), "at least one folder"),
            "out": (bool(self.out), "a folder"),
            "proxy": (self.proxy != "", "a folder or an id, or no such key for the target's own first layers"),
            "learning_rate": (0 < self.learning_rate < math.inf, "a number above 0"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "a number of at least 0"),
            "epochs": (self.epochs >= 1, "at least 1"),
            "batch": (self.batch >= 1, "at least 1"),
            "warm_up": (0 <= self.warm_up < 1, "a number in [0, 1)"),
            "ema_decay": (0 <= self.ema_decay < 1, "a number in [0, 1)"),
            "clip_norm": (0 < self.clip_norm < math.inf, "a number above 0"),
            "noise": (0 <= self.noise < math.inf, "a number of at least 0"),
            "seed": (self.seed >= 0, "at least 0"),
            "patience": (self.patience >= 1, "at least 1"),
            "ridge": (0 <= self.ridge < math.inf, "a number of at least 0"),
        }
        for name, (met, expected) in rules.items():
            if not met:
                raise InvalidInputError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

    @classmethod
    def read(cls, path: str | Path, **replaced: Any) -> TrainingConfig:
        """Read a TOML file.

        Args:
            path: The file. Folders in it are relative to the working folder; ``~`` is the home folder.
            replaced: Fields that replace those of the file.

        Raises:
            FileNotFoundError: There is no such file.
            InvalidInputError: The file is not TOML, or a field is unknown, missing or invalid.
        """
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"expected a TOML file, but {path} is not one: {error}") from error
        try:
            return cls.from_dict(data | replaced)
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrainingConfig:
        """Make a config from plain values, as TOML or JSON has them.

        Raises:
            InvalidInputError: A field is unknown, missing or invalid.
        """
        given = _checked(cls, data, "")
        given["features"] = FeatureRecipe(**_checked(FeatureRecipe, given["features"], "features."))
        if "loss" in given:
            given["loss"] = HybridLoss(**_checked(HybridLoss, given["loss"], "loss."))
        if "mapper" in given:
            _refuse_unknown("mapper", given["mapper"], SIZES)
            for name, value in given["mapper"].items():
                _check_kind(f"mapper.{name}", value, "float" if name == "dropout" else "int")
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """The fields as values for JSON, which `from_dict` reads back."""
        return dataclasses.asdict(self)

    @property
    def folder(self) -> Path:
        """``out`` as a path, with ``~`` expanded."""
        return Path(self.out).expanduser()

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints, inside ``folder``."""
        return self.folder / "checkpoints"

    def identity(self) -> dict[str, Any]:
        """The fields that determine the trained weights, as values for JSON."""
        return {name: value for name, value in self.to_dict().items() if name not in FREE}


def _checked(kind: Any, data: dict[str, Any], where: str) -> dict[str, Any]:
    """Check the names and types of a dataclass's arguments, and return a copy of them."""
    fields = {entry.name: entry for entry in dataclasses.fields(kind)}
    _refuse_unknown(where.rstrip(".") or "the file", data, fields)
    missing = [
        name
        for name, entry in fields.items()
        if entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING and name not in data
    ]
    if missing:
        raise InvalidInputError(f"expected a value for {', '.join(where + name for name in missing)}, got none")
    for name, value in data.items():
        _check_kind(where + name, value, str(fields[name].type))
    return dict(data)


def _refuse_unknown(where: str, found: Collection[str], known: Collection[str]) -> None:
    if unknown := sorted(set(found) - set(known)):
        raise InvalidInputError(f"unknown in {where}: {', '.join(unknown)}; expected some of {', '.join(known)}")


def _check_kind(name: str, value: Any, annotation: str) -> None:
    """Refuse a value that does not have the annotated type."""
    expected, fits = KINDS[annotation]
    if not fits(value):
        raise InvalidInputError(f"{name}: expected {expected}, got {value!r}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_whole(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(map(fits, value))


#: For each annotation of a field: the type in words, and a test for values that TOML reads.
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("text", _is_text),
    "str | None": ("text", lambda value: value is None or _is_text(value)),
    "int": ("a whole number", _is_whole),
    "float": ("a number", _is_number),
    "tuple[str, ...]": ("a list of text", _list_of(_is_text)),
    "tuple[int, ...]": ("a list of whole numbers", _list_of(_is_whole)),
    "tuple[float, ...]": ("a list of numbers", _list_of(_is_number)),
    "FeatureRecipe": ("a table", _is_table),
    "HybridLoss": ("a table", _is_table),
    "dict[str, Any]": ("a table", _is_table),
    "dict[str, float]": ("a table of numbers", lambda value: _is_table(value) and all(map(_is_number, value.values()))),
}
