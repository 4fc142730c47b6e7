"""The phases of a cache's life, and which thread may use the cache."""

from __future__ import annotations

import enum
import threading

from ..errors import CacheStateError


class Phase(enum.Enum):
    """The phases of a cache's life.

    ::

        EMPTY ──first forward──> PREFILL ──scored and pruned──> READY ──more forwards──> READY
          ^                         │                             │
          │                         └──────a forward failed───────┤
          └──────reset()──── SPOILED <───────────────────────────┘

    A prefill is one forward, or several if the prompt comes in chunks. ``reset()`` empties a cache in every phase but
    CLOSED. ``close()`` leads from every phase to CLOSED, and no call leads out of CLOSED.
    """

    EMPTY = "empty"
    PREFILL = "in its prefill"
    READY = "ready"
    SPOILED = "spoiled"
    CLOSED = "closed"


class Lifecycle:
    """The phase of a cache, and the thread that runs a forward with it."""

    def __init__(self) -> None:
        self.phase = Phase.CLOSED
        self._thread: threading.Thread | None = None

    @property
    def in_forward(self) -> bool:
        """Whether a forward has begun and has not ended."""
        return self._thread is not None

    def begin_forward(self) -> None:
        """Note that the calling thread begins a forward with the cache."""
        self._thread = threading.current_thread()

    def end_forward(self) -> None:
        """Note that the forward is over, or that it will never end."""
        self._thread = None

    def used_elsewhere(self) -> bool:
        """Whether another thread, which is still alive, runs a forward with the cache."""
        thread = self._thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    def check_thread(self) -> None:
        """Refuse a call while another thread runs a forward with the cache.

        Raises:
            CacheStateError: Another thread does.
        """
        if self.used_elsewhere():
            raise CacheStateError(
                "the cache is in use by another thread, in a forward: wait until that forward is over, or fork() the "
                "cache before it begins; call reset() if the forward never ends"
            )

    def check_phase(self) -> None:
        """Refuse a call on a cache that cannot be used.

        Raises:
            CacheStateError: The cache is closed or spoiled.
        """
        if self.phase is Phase.CLOSED:
            raise CacheStateError("the cache is closed: make a new one")
        if self.phase is Phase.SPOILED:
            raise CacheStateError(
                "an exception during a forward or a prune left the cache half written: call reset() or make a new one"
            )

    def check_empty(self) -> None:
        """Refuse to prefill a cache that holds a prompt already.

        Raises:
            CacheStateError: The cache is not empty.
        """
        if self.phase is not Phase.EMPTY:
            raise CacheStateError(f"expected an empty cache, got one that is {self.phase.value}: call reset() first")
