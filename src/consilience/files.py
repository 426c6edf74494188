"""Files that are either whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

CHECKPOINTS = 2  # kept at any time: the newest, and one to fall back on


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write beside, flush to the disk, rename over: a kill at any instant leaves the old file or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(beside, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
