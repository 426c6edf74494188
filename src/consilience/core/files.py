"""Atomic writes, reads that follow no links, and errors of writing in plain words."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from consilience.core.errors import CheckpointError

CHECKPOINTS = 2  # kept by default: the newest, and one in reserve
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNFINISHED = re.compile(r"\..+\.(\d+)\.tmp")  # a file that `write_atomically` writes, with the number of its process
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # which follows no link
PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # neither a link nor a pipe that waits


def user_cache() -> Path | None:
    """The folder of the user's cache that this library has; None without a home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "consilience"
    except RuntimeError:
        return None


def write_atomically(path: Path, data: bytes | str, *, private: bool = False, lasting: bool = True) -> None:
    """Write to a temporary file, flush it to the disk and rename it: a kill leaves the old file or the new one. A link
    at `path` is replaced, not followed. A `private` file can be read by its owner alone. One that is not `lasting` is
    not flushed: no other process will read it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with named(path):
        try:
            with suppress(FileNotFoundError):
                beside.unlink()
            with open(os.open(beside, _NEW, 0o600 if private else 0o666), "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                if lasting:
                    os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError:
            with suppress(OSError):
                beside.unlink()  # a full disk needs the space
            raise
        if not lasting:
            return
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_file(path: Path) -> bytes:
    """The content of a regular file. A link, or a pipe or device, is an OSError: a directory of another user may name
    files that only the reader may see, or one that never ends."""
    try:
        file = os.open(path, os.O_RDONLY | PLAIN)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a symbolic link, which is not followed", str(path)) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        with open(file, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(file)


def below(root: Path, *parts: str) -> Path:
    """A path inside the directory `root`; a CheckpointError if it leaves it, by its name or through a link."""
    path = root
    for part in Path(*parts).parts:
        path = path / part
        if part == ".." or Path(part).is_absolute() or path.is_symlink():
            raise CheckpointError(f"{path} leads out of {root}: put the directory itself there")
    return path


def private_folder(path: Path) -> None:
    """Make a folder and its missing parents, which only their owner can enter."""
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    with suppress(PermissionError):  # another user's: the files in it are private
        path.chmod(0o700)


def remove_unfinished(folder: Path) -> None:
    """Delete temporary files that killed processes left in a folder."""
    for entry in os.scandir(folder) if folder.is_dir() else ():
        found = _UNFINISHED.fullmatch(entry.name)
        if found and not _runs(int(found[1])):
            with suppress(OSError):
                os.unlink(entry.path)


def _runs(process: int) -> bool:
    """Whether another process of this number runs."""
    if process == os.getpid():  # a container gives the same number again
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


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
