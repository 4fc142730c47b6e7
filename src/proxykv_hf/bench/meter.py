"""The peak memory that a piece of work takes, beyond what was in use before it."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from ..proxy.lane import trim_heap

_PROCESS = Path("/proc/self")


class PeakMemory:
    """The peak memory since this object was made, beyond what was in use then.

    Memory that earlier work has freed is returned to the system first, so that it does not count as in use.

    Args:
        device: Where the work runs. On CUDA the memory is what torch has allocated on this device; on any other
            device it is the resident memory of the whole process, which only Linux reports.
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
        """The peak so far, in bytes; None where it cannot be measured."""
        if self._before is None:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._before
        return _status("VmHWM") - self._before


def _forget_peak() -> bool:
    """Reset the process's peak of resident memory to what is resident now; False if that is not possible."""
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:  # not Linux, or a sandbox that does not allow it
        return False
    return True


def _status(field: str) -> int:
    """A size in ``/proc/self/status``, in bytes."""
    for line in (_PROCESS / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_PROCESS / 'status'} has no {field}")
