"""Data files: where they are, how they are read, and errors for missing or damaged ones."""

import gzip
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from consilience.core.errors import DataError


def data_root(root: str | Path | None) -> Path:
    """The folder that holds a folder for each data set."""
    return Path(root or os.environ.get("CONSILIENCE_DATA") or "data").expanduser()


def missing(name: str, file: str, folder: Path, source: str) -> DataError:
    """The error for a missing file: its name and folder, its source, and how to set the folder."""
    return DataError(
        f"{name} needs the file {file}, which is not in {folder.absolute()}: get it from {source} and put it "
        f"there, or set the environment variable CONSILIENCE_DATA to the folder that holds {name}/"
    )


def read_bytes(path: Path) -> bytes:
    """The bytes of a file, unpacked if its content is gzip: browsers unpack downloads and keep the name."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is a damaged or truncated gzip file ({error}); get it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def normalisation(mean: Sequence[float], std: Sequence[float], top: float = 255.0) -> tuple[Tensor, Tensor]:
    """(scale, shift) [C, 1, 1] such that x · scale + shift = (x / top − mean) / std."""
    centre = torch.tensor(mean, dtype=torch.float64).view(-1, 1, 1)
    spread = torch.tensor(std, dtype=torch.float64).view(-1, 1, 1)
    return (1 / (top * spread)).float(), (-centre / spread).float()


def common_names(train: Sequence[str], test: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the groups in train and in test, in an order that gives a name the same number in both."""
    known = set(train)
    return tuple(train), (*train, *(name for name in test if name not in known))
