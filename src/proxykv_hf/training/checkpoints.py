"""The checkpoints of a training run: the last epoch and the best one, each written atomically.

``epoch-0003/`` holds ``mapper.safetensors`` and ``averaged.safetensors`` (the weights and their running mean),
``optimizer.pt`` (the state of AdamW and of the schedule) and ``state.json`` (the identity of the run, and its history).
No state of random generators is saved: random numbers in training depend only on the seed, the epoch and the position
in the epoch.
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
"""The entry of an epoch in the history; see `loop.train`."""


@dataclass(frozen=True)
class Trained:
    """Everything that changes in training.

    Args:
        mapper: The mapper that is trained.
        averaged: A mapper with the running mean of its weights.
        optimizer: The optimizer of the mapper's parameters.
        scheduler: The learning-rate schedule of the optimizer.
    """

    mapper: HybridAxialMapper
    averaged: HybridAxialMapper
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler


class Checkpoints:
    """A folder of checkpoints.

    Args:
        folder: The folder; created if missing.
        identity: Everything that determines the trained weights, as values for JSON.
    """

    def __init__(self, folder: str | Path, identity: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.identity = plain(identity)

    def start(self, resume: bool) -> None:
        """Check, before any work, that the run may start or resume.

        Raises:
            InvalidInputError: There are checkpoints, and ``resume`` is false or they belong to another run.
        """
        last = self.last()
        if last is None:
            return
        if not resume:
            raise InvalidInputError(
                f"{self.folder} holds checkpoints of an earlier run: continue it (--resume), delete them, or give "
                "another --out"
            )
        found = json.loads((last / "state.json").read_text(encoding="utf-8"))["identity"]
        different = list(differences({"run": self.identity}, {"run": found}))
        if different:
            raise InvalidInputError(
                f"{last} is of another run: {'; '.join(line.removeprefix('run.') for line in different)}. Give the "
                "config and the data that it was made with, delete it, or give another --out"
            )

    def save(self, trained: Trained, history: list[Epoch], best: int) -> None:
        """Save the state after an epoch, atomically, then delete all checkpoints but this one and the best one.

        Args:
            trained: The state to save.
            history: The entries of all epochs so far; the last one is the epoch to save.
            best: The epoch whose averaged weights agree best with the teacher, from 1.
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
        """The folder of the last epoch, or None if there is no checkpoint."""
        return max(self._all(), default=None)

    def restore(self, trained: Trained) -> list[Epoch]:
        """Restore the state of the last checkpoint and return its history; `[]` if there is no checkpoint."""
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
        """Load the averaged weights of an epoch, from 1, into ``module``; the epoch must have a checkpoint."""
        module.load_state_dict(load_file(self._path(epoch) / "averaged.safetensors"))

    def _path(self, epoch: int) -> Path:
        return self.folder / f"epoch-{epoch:04d}"

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob("epoch-*"))
