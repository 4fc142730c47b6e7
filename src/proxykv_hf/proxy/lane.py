"""Where work runs beside the target: a thread of its own and, on CUDA, a stream of its own."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..attention.functions import attention_modules
from ..errors import InvalidInputError

T = TypeVar("T")


class Cancelled(Exception):
    """The job was cancelled: nobody wants its result any more."""


_thread = threading.local()  # ``job``: the job that the thread runs


def check_cancelled() -> None:
    """Raise `Cancelled` if the calling thread runs a job that was cancelled; other threads may call it too."""
    job: Job[Any] | None = getattr(_thread, "job", None)
    if job is not None and job.cancelled:
        raise Cancelled


@contextlib.contextmanager
def cancellable(model: nn.Module) -> Iterator[None]:
    """Call `check_cancelled` in every attention layer of the model's forwards, for as long as the context is open."""
    handles = [module.register_forward_pre_hook(lambda *_: check_cancelled()) for module in attention_modules(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def usable_device(device: torch.device | str) -> torch.device:
    """``device``, where torch can compute on it here.

    Raises:
        InvalidInputError: It cannot: CUDA is wanted where there is none, say.
    """
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:  # torch's own words for an unknown device and a missing one
        raise InvalidInputError(
            f"device: expected one that torch finds here, got {str(device)!r} ({str(error).splitlines()[0]})"
        ) from error
    return place


def trim_heap() -> None:
    """Have glibc return freed memory to the system; another C library has no such call.

    It would keep what a lane's thread has freed for threads like it, beside all that the target takes.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class Job(Generic[T]):
    """Work under way on a lane."""

    def __init__(
        self,
        work: Callable[[], T],
        device: torch.device,
        stream: torch.cuda.Stream | None,
        threads: int | None,
    ) -> None:
        self._work, self._device, self._stream, self._threads = work, device, stream, threads
        self._result: T | None = None
        self._error: BaseException | None = None
        self._cancelled = threading.Event()
        # Whether the thread is through. Its `is_alive` is no answer: an interrupted `join` takes it for dead.
        self._done = threading.Event()
        if self._stream is not None:
            # What the caller has queued so far, the prompt's copy to the device say, comes first.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._after: torch.cuda.Event | None = None
        self._thread = threading.Thread(target=self._run, name="proxykv-lane", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._threads is not None:
                set_own_threads(self._threads)
            _thread.job = self
            with torch.no_grad():
                if self._stream is None:
                    self._result = self._work()
                else:
                    with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                        self._result = self._work()
                        self._after = self._stream.record_event()
        except BaseException as error:
            self._error = error
        finally:
            _thread.job = None
            del self._work  # and with it all that the work held
            if self._device.type == "cpu":
                trim_heap()
            self._done.set()

    def ready(self) -> bool:
        """Whether the work is done, and went well: `result` would return without waiting for the thread."""
        return self._done.is_set() and self._error is None

    def wait(self, timeout: float | None = None) -> None:
        """Return when the work is done, or after ``timeout`` seconds."""
        self._done.wait(timeout)

    def result(self, timeout: float | None = None) -> T:
        """What the work returned, for the caller's stream to use.

        Args:
            timeout: Seconds to wait; None for as long as it takes.

        Raises:
            TimeoutError: It took longer.
            BaseException: What the work raised, with its own traceback.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the scores were not there after {timeout:g} s")
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._after is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._after)
            if isinstance(self._result, Tensor):
                self._result.record_stream(stream)
        result, self._result = self._result, None
        return result  # type: ignore[return-value]

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Have the work stop at its next `check_cancelled`, and wait until it has: its memory is free then."""
        self._cancelled.set()
        if threading.current_thread() is not self._thread:  # where the collector may have brought us
            self._done.wait()
        self._result = self._error = None


_default_threads = threading.Lock()


def set_own_threads(count: int) -> None:
    """Set the CPU threads that the calling thread's work uses.

    ``torch.set_num_threads`` also sets what threads started later begin with: that is put back at once.
    """
    torch.get_num_threads()  # the first question in a thread sets the default: it must not come later
    with _default_threads:
        default = _in_new_thread(torch.get_num_threads)
        torch.set_num_threads(count)
        _in_new_thread(lambda: torch.set_num_threads(default))


def _in_new_thread(work: Callable[[], T]) -> T:
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


class Lane:
    """Starts jobs.

    Args:
        device: Where they compute.
        threads: CPU threads that a job uses; None for as many as torch uses elsewhere.

    Raises:
        InvalidInputError: torch cannot compute there.
    """

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        self.device = usable_device(device)
        self.threads = threads
        # One for all jobs: memory that a job frees is kept for the same stream.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Start ``work`` and return at once."""
        return Job(work, self.device, self._stream, self.threads)
