"""Atomic writes, and errors of writing in plain words."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from consilience.core.errors import CheckpointError

CHECKPOINTS = 2  # kept at any time: the newest, and one in reserve
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write to a temporary file, flush it to the disk and rename it: a kill leaves the old file or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with named(path):
        try:
            with open(beside, "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError:
            with suppress(OSError):
                beside.unlink()  # a full disk needs the space
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the file name to an OSError in the block; the error of a full disk has none."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn an OSError about a file of `folder` into a CheckpointError with a remedy."""
    try:
        yield
    except OSError as error:
        if not isinstance(error.filename, str) or not Path(error.filename).is_relative_to(folder):
            raise
        remedy = "free some space" if error.errno in FULL else "make it writable"
        raise CheckpointError(f"{error.filename} cannot be written ({error.strerror}): {remedy}, and resume") from error
