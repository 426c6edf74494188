"""A cache of decoded images and of features in the user's cache folder."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

Images = tuple[Tensor, str]
"""Images [N, C, H, W] and the formats they were stored in."""


def cached(source: Path, column: str, rows: int, decode: Callable[[], Images]) -> Images:
    """`decode()`, or its stored result for the same file (path, size, time of change).

    A cache that cannot be read or written costs time, and is no error.
    """
    entry = place(source, column)
    if entry is None:
        return decode()
    found = _read(entry, rows)
    if found is None:
        found = decode()
        write(entry, save({"images": found[0]}, {"formats": found[1]}))
    return found


def place(source: Path, what: str) -> Path | None:
    """The file of the cache for something made from a file (path, size, time of change); None without a folder."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # no home folder
        return None
    stat = source.stat()
    identity = f"{source.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n{what}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:20]
    return Path(base) / "consilience" / f"{source.stem}-{digest}.safetensors"


def _read(entry: Path, rows: int) -> Images | None:
    try:
        with safe_open(entry, framework="pt") as file:
            images, forms = file.get_tensor("images"), file.metadata()["formats"]
    except (OSError, SafetensorError, KeyError, TypeError):
        return None
    return (images, forms) if len(images) == rows else None


def write(entry: Path, content: bytes) -> None:
    """Write a file of the cache, whole or not at all."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=entry.parent, prefix=entry.stem)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(beside, entry)
        except BaseException:
            os.unlink(beside)
            raise
    except OSError:
        pass
