"""The most memory that a piece of work takes beyond what was held before it."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from ..proxy.lane import trim_heap

_PROCESS = Path("/proc/self")


class PeakMemory:
    """Starts to count as it is made.

    What an earlier piece of work has freed is given back first, so that it counts neither as held nor as taken.

    Args:
        device: Of a CUDA device the memory that torch has allocated there; of any other the whole process's
            resident memory, which only Linux tells.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before: int | None = torch.cuda.memory_allocated(device)
        else:
            trim_heap()
            self._before = _status("VmRSS") if _forget_peak() else None

    def bytes(self) -> int | None:
        """The most so far, in bytes; None where it cannot be told."""
        if self._before is None:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._before
        return _status("VmHWM") - self._before


def _forget_peak() -> bool:
    """Let the peak of resident memory begin anew from what is resident now; whether that could be done."""
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:  # no Linux, or a sandbox that does not allow it
        return False
    return True


def _status(field: str) -> int:
    """A size in ``/proc/self/status``, in bytes."""
    for line in (_PROCESS / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_PROCESS / 'status'} has no {field}")
