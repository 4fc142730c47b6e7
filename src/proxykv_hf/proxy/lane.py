"""Runs work beside the target: in a thread of its own and, on CUDA, on a stream of its own."""

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
    """The job was cancelled: its result is no longer wanted."""


_thread = threading.local()  # its attribute ``job`` is the job that the thread runs


def check_cancelled() -> None:
    """Raise `Cancelled` if the calling thread runs a job that was cancelled. In other threads, do nothing."""
    job: Job[Any] | None = getattr(_thread, "job", None)
    if job is not None and job.cancelled:
        raise Cancelled


@contextlib.contextmanager
def cancellable(model: nn.Module) -> Iterator[None]:
    """Call `check_cancelled` in every attention layer of the model's forwards, as long as the context is open."""
    handles = [module.register_forward_pre_hook(lambda *_: check_cancelled()) for module in attention_modules(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def usable_device(device: torch.device | str) -> torch.device:
    """``device`` as a `torch.device`, if torch can compute on it here.

    Raises:
        InvalidInputError: torch cannot compute on it, for example on CUDA without a GPU.
    """
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:  # torch raises these for an unknown device and for a missing one
        raise InvalidInputError(
            f"device: expected one that torch finds here, got {str(device)!r} ({str(error).splitlines()[0]}): give "
            "another device"
        ) from error
    return place


def trim_heap() -> None:
    """Make glibc return freed memory to the system. Other C libraries have no such call.

    Otherwise glibc keeps the memory that a lane's thread has freed for later threads, in addition to what the target
    takes.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class Job(Generic[T]):
    """Work that runs on a lane."""

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
        # Whether the work is done. `Thread.is_alive` cannot tell: after an interrupted `join` it is wrong.
        self._done = threading.Event()
        if self._stream is not None:
            # What the caller has queued so far comes first, for example the copy of the prompt to the device.
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
            del self._work  # frees everything that the work held
            if self._device.type == "cpu":
                trim_heap()
            self._done.set()

    def ready(self) -> bool:
        """Whether the work has ended without an error, so that `result` returns without waiting for the thread."""
        return self._done.is_set() and self._error is None

    def wait(self, timeout: float | None = None) -> None:
        """Return when the work is done, or after ``timeout`` seconds."""
        self._done.wait(timeout)

    def result(self, timeout: float | None = None) -> T:
        """What the work returned, ready for use on the caller's stream.

        Args:
            timeout: Seconds to wait; None waits as long as it takes.

        Raises:
            TimeoutError: The work took longer.
            BaseException: The work raised this error; it keeps its own traceback.
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
        """Stop the work at its next `check_cancelled`, and wait until it has stopped. Its memory is then free."""
        self._cancelled.set()
        if (
            threading.current_thread() is not self._thread
        ):  # the garbage collector may call this in the job's own thread
            self._done.wait()
        self._result = self._error = None


_default_threads = threading.Lock()


def set_own_threads(count: int) -> None:
    """Set how many CPU threads torch uses for the calling thread's work.

    ``torch.set_num_threads`` also sets the default for threads that start later. That default is put back at once.
    """
    torch.get_num_threads()  # the first call in a thread sets its number to the default: it must not come later
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
    """Starts jobs beside the target.

    Args:
        device: The device that the jobs compute on.
        threads: CPU threads that a job uses; None for as many as torch uses elsewhere.

    Raises:
        InvalidInputError: torch cannot compute on ``device``.
    """

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        self.device = usable_device(device)
        self.threads = threads
        # One stream for all jobs, because CUDA's allocator keeps freed memory for the stream that used it.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Start ``work`` and return at once."""
        return Job(work, self.device, self._stream, self.threads)
