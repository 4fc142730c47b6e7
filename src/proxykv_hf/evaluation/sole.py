"""A lock, so that one run at a time writes to a file."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import InvalidInputError


@contextlib.contextmanager
def sole_use(path: Path) -> Iterator[None]:
    """Lock a file, which need not exist yet, for the time of the block.

    A second lock on the same file fails, even if it is reached by a link. The lock is on another file beside it, since
    `files.write_whole` replaces the file itself. If a process is killed, its lock is released. If the system or the
    disk has no locks, nothing is locked.

    Raises:
        InvalidInputError: Another run holds the lock.
    """
    if importlib.util.find_spec("fcntl") is None:  # Windows
        yield
        return
    import fcntl

    place = path.resolve()
    beside = place.with_name(f".{place.name}.lock")
    while True:
        with beside.open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InvalidInputError(
                    f"{path} is in use by another run: wait until it is over, or give another --out"
                ) from error
            except OSError:  # a disk without locks
                pass
            if not _is_still(lock.fileno(), beside):
                continue  # the last run removed this file after it was opened here: the next run would lock a new one
            try:
                yield
            finally:
                beside.unlink(missing_ok=True)
            return


def _is_still(number: int, path: Path) -> bool:
    """Whether the open file is still the file at ``path``."""
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False
