"""Where a training run stands, on disk: the last epoch and the best one, each whole or not there.

``epoch-0003/`` holds ``mapper.safetensors`` and ``averaged.safetensors`` (the weights and their running mean),
``optimizer.pt`` (AdamW and the schedule) and ``state.json`` (what the run is, and its history). There is no state
of random generators: what is random in training is drawn from the seed, the epoch and the place within it.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn

from ..errors import InvalidInputError
from ..files import write_whole
from ..proxy.mapper import HybridAxialMapper
from .shards import differences, plain

Epoch = dict[str, Any]
"""What history has of an epoch, see `loop.train`."""


@dataclass(frozen=True)
class Trained:
    """All that changes in training.

    Args:
        mapper: As it is trained.
        averaged: Its running mean.
        optimizer: Of the mapper's parameters.
        scheduler: Of the optimizer.
    """

    mapper: HybridAxialMapper
    averaged: HybridAxialMapper
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler


class Checkpoints:
    """A folder of them.

    Args:
        folder: Made where missing.
        identity: What decides the weights that come out, for JSON.
    """

    def __init__(self, folder: str | Path, identity: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.identity = plain(identity)

    def start(self, resume: bool) -> None:
        """Look before any work whether the run may begin, or go on.

        Raises:
            InvalidInputError: There are checkpoints, and they are not to be gone on with, or are those of another run.
        """
        last = self.last()
        if last is None:
            return
        if not resume:
            raise InvalidInputError(
                f"{self.folder} holds checkpoints of an earlier run: go on with it (--resume), delete them, or give "
                "another --out"
            )
        found = json.loads((last / "state.json").read_text(encoding="utf-8"))["identity"]
        different = list(differences({"run": self.identity}, {"run": found}))
        if different:
            raise InvalidInputError(
                f"{last} is of another run: {'; '.join(line.removeprefix('run.') for line in different)}. Give what it "
                "was made with, delete it, or give another --out"
            )

    def save(self, trained: Trained, history: list[Epoch], best: int) -> None:
        """After an epoch; it appears whole. All but this and the best one are deleted then.

        Args:
            trained: What to keep.
            history: Of all epochs so far; the checkpoint is that of the last one.
            best: The epoch whose averaged weights agreed best, from 1.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".epoch-*"):
            shutil.rmtree(leftover)
        path = self._path(len(history))
        unfinished = path.with_name(f".{path.name}-{os.getpid()}")
        unfinished.mkdir()
        for name, module in (("mapper", trained.mapper), ("averaged", trained.averaged)):
            tensors = {key: tensor.contiguous() for key, tensor in module.state_dict().items()}
            write_whole(unfinished / f"{name}.safetensors", save(tensors))
        steps = io.BytesIO()
        torch.save({"optimizer": trained.optimizer.state_dict(), "scheduler": trained.scheduler.state_dict()}, steps)
        write_whole(unfinished / "optimizer.pt", steps.getvalue())
        state = {"identity": self.identity, "history": history}
        write_whole(unfinished / "state.json", json.dumps(state, indent=1).encode())
        os.replace(unfinished, path)
        for other in self._all():
            if other not in (path, self._path(best)):
                shutil.rmtree(other)

    def last(self) -> Path | None:
        """The folder of the last epoch, or None."""
        return max(self._all(), default=None)

    def restore(self, trained: Trained) -> list[Epoch]:
        """Put all as it was after the last epoch that was saved, and return its history; `[]` if there is none."""
        last = self.last()
        if last is None:
            return []
        trained.mapper.load_state_dict(load_file(last / "mapper.safetensors"))
        trained.averaged.load_state_dict(load_file(last / "averaged.safetensors"))
        steps = torch.load(last / "optimizer.pt", map_location="cpu", weights_only=True)
        trained.optimizer.load_state_dict(steps["optimizer"])
        trained.scheduler.load_state_dict(steps["scheduler"])
        history: list[Epoch] = json.loads((last / "state.json").read_text(encoding="utf-8"))["history"]
        return history

    def load_averaged(self, module: nn.Module, epoch: int) -> None:
        """The running mean of the weights as it was after an epoch that is kept, from 1."""
        module.load_state_dict(load_file(self._path(epoch) / "averaged.safetensors"))

    def _path(self, epoch: int) -> Path:
        return self.folder / f"epoch-{epoch:04d}"

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob("epoch-*"))
