"""A file that one run at a time writes to."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import InvalidInputError


@contextlib.contextmanager
def sole_use(path: Path) -> Iterator[None]:
    """Keep everybody else who asks for the same file, by whatever link, out of the block; it need not be there yet.

    What is locked is a file beside it, since `files.write_whole` puts another in the place of the file itself. The lock
    of a process that was killed is free. Where the system or the disk knows no locks, nobody is kept out.

    Raises:
        InvalidInputError: Another run uses it.
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
                continue  # the run before removed it after it was opened here: others would lock a new one
            try:
                yield
            finally:
                beside.unlink(missing_ok=True)
            return


def _is_still(number: int, path: Path) -> bool:
    """Whether an open file is the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False
