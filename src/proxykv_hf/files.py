"""Atomic writes: a file is complete, or it is not there."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically. If the write fails, for example on a full disk, the old file stays as it was.

    If ``path`` is a symbolic link, the file that the link leads to is replaced.
    """
    place = path.resolve()
    temporary = place.with_name(f".{place.name}-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, place)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # the error of a full disk does not name the file
            error.filename = str(path)
        raise
