"""The phases of a cache's life, and which thread may use it."""

from __future__ import annotations

import enum
import threading

from ..errors import CacheStateError


class Phase(enum.Enum):
    """Where a cache is in its life.

    ::

        EMPTY ──first forward──> PREFILL ──scored and pruned──> READY ──more forwards──> READY
          ^                         │                             │
          │                         └──────a forward failed───────┤
          └──────reset()──── SPOILED <───────────────────────────┘

    A prefill is one forward, or several where the prompt comes in chunks. ``reset()`` empties a cache in every phase
    but CLOSED, which ``close()`` leads to from all others and which nothing leads out of.
    """

    EMPTY = "empty"
    PREFILL = "in its prefill"
    READY = "ready"
    SPOILED = "spoiled"
    CLOSED = "closed"


class Lifecycle:
    """A cache's phase, and the thread that runs a forward with it."""

    def __init__(self) -> None:
        self.phase = Phase.CLOSED
        self._thread: threading.Thread | None = None

    @property
    def in_forward(self) -> bool:
        """Whether a forward has begun and has not ended."""
        return self._thread is not None

    def begin_forward(self) -> None:
        """The calling thread begins a forward with the cache."""
        self._thread = threading.current_thread()

    def end_forward(self) -> None:
        """The forward is over, or will never end."""
        self._thread = None

    def used_elsewhere(self) -> bool:
        """Whether another thread, which still runs, is in a forward."""
        thread = self._thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    def check_thread(self) -> None:
        """Refuse a call while another thread is in a forward.

        Raises:
            CacheStateError: It is.
        """
        if self.used_elsewhere():
            raise CacheStateError(
                "the cache is in use by another thread, in a forward: call when that is through, or fork() before; "
                "reset() if it never ends"
            )

    def check_phase(self) -> None:
        """Refuse a call on a cache that holds nothing usable.

        Raises:
            CacheStateError: The cache is closed or spoiled.
        """
        if self.phase is Phase.CLOSED:
            raise CacheStateError("the cache is closed: make a new one")
        if self.phase is Phase.SPOILED:
            raise CacheStateError(
                "an exception in its midst left the cache half written: call reset() or make a new one"
            )

    def check_empty(self) -> None:
        """Refuse a prefill of a cache that holds a prompt.

        Raises:
            CacheStateError: It does.
        """
        if self.phase is not Phase.EMPTY:
            raise CacheStateError(f"expected an empty cache, got one that is {self.phase.value}: call reset() first")
