"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """The file, or where it leads if it is a link, appears whole or, with a full disk say, stays what it was."""
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
        if isinstance(error, OSError):  # a full disk does not say where
            error.filename = str(path)
        raise
