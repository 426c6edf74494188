"""STL-10 in its binary form: bytes without a header."""

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from consilience.core.errors import DataError
from consilience.data.dataset import Data, Dataset
from consilience.data.loaders.files import missing, normalisation

_NAME = "stl10"
_SOURCE = "https://cs.stanford.edu/~acoates/stl10/ (stl10_binary.tar.gz, unpacked)"
_SHAPE = (3, 96, 96)
_CLASSES = 10


def stl10(root: Path) -> Data:
    """Ten classes of 96×96 colour photographs, 5,000 + 8,000.

    The files of stl10_binary.tar.gz are read from stl10/stl10_binary/, stl10/ or stl10_binary/. The 100,000 images
    without labels are not read, and the ten folds of the training set are not used.
    """
    folder = _folder(root)
    classes = _class_names(_find(folder, "class_names.txt"))
    scale, shift = normalisation((0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713))
    train, test = (
        Dataset(*_split(folder, split), classes=classes, scale=scale, shift=shift, name=_NAME)
        for split in ("train", "test")
    )
    return Data(train, test)


def _folder(root: Path) -> Path:
    places = (root / _NAME / "stl10_binary", root / _NAME, root / "stl10_binary")
    return next((place for place in places if any(place.glob("*_[Xy].bin"))), root / _NAME)


def _find(folder: Path, file: str) -> Path:
    if not (folder / file).is_file():
        raise missing(_NAME, file, folder, _SOURCE)
    return folder / file


def _read(path: Path) -> npt.NDArray[np.uint8]:
    """Not by `read_bytes`: the first pixels may equal the first bytes of a gzip file."""
    try:
        return np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _class_names(path: Path) -> tuple[str, ...]:
    names = tuple(_read(path).tobytes().decode(errors="replace").split())
    if len(names) != _CLASSES:
        raise DataError(f"{path} holds {len(names)} names; {_NAME} has {_CLASSES} classes")
    return names


def _split(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    image_file, label_file = (_find(folder, f"{split}_{part}.bin") for part in "Xy")
    x, y = _images(image_file), _labels(label_file)
    if len(x) != len(y):
        raise DataError(f"{image_file} holds {len(x)} images but {label_file} holds {len(y)} labels")
    return x, y


def _images(path: Path) -> Tensor:
    """[N, 3, 96, 96]; the file has the columns of a channel one after another."""
    content = _read(path)
    each = math.prod(_SHAPE)
    if not len(content) or len(content) % each:
        raise DataError(
            f"{path} is truncated or not {_NAME}'s: it holds {len(content)} bytes, which are not images of "
            f"{' × '.join(map(str, _SHAPE))} ({each} bytes each)"
        )
    return torch.from_numpy(content).view(-1, *_SHAPE).transpose(2, 3).contiguous()


def _labels(path: Path) -> Tensor:
    """0 to 9; the file has 1 to 10."""
    y = torch.from_numpy(_read(path)).long()
    wrong = y[(y < 1) | (y > _CLASSES)]
    if len(wrong):
        raise DataError(f"{path} holds the label {int(wrong[0])}; {_NAME} has the labels 1 to {_CLASSES}")
    return y - 1
