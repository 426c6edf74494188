"""The MNIST family: idx files, with or without gzip."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from consilience.core.errors import DataError
from consilience.data.dataset import Data, Dataset
from consilience.data.loaders.files import missing, normalisation, read_bytes

_TYPES = {8: ("unsigned bytes", ">u1"), 12: ("32-bit integers", ">i4")}
_SPLITS = ("train", "t10k")
_CLOTHES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
_MNIST = "https://yann.lecun.com/exdb/mnist"
_FASHION = "https://github.com/zalandoresearch/fashion-mnist"
_QMNIST = "https://github.com/facebookresearch/qmnist"


def read_idx(path: Path, code: int, dims: int) -> Tensor:
    """The array of an idx file: two zero bytes, a type code, the number of dimensions, each dimension, and the values,
    all big-endian."""
    content = read_bytes(path)
    kind, dtype = _TYPES[code]
    header = 4 + 4 * dims
    if content[:4] != bytes([0, 0, code, dims]) or len(content) < header:
        start = content[:4].hex(" ") or "nothing"
        raise DataError(f"{path} is not an idx file of {kind} in {dims} dimension(s): it starts with {start}")
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", dims, offset=4))
    expected, found = math.prod(shape) * np.dtype(dtype).itemsize, len(content) - header
    if found != expected:
        sizes = " × ".join(map(str, shape))
        raise DataError(f"{path} announces {sizes} {kind} ({expected} bytes) but holds {found} bytes")
    values = np.frombuffer(content, dtype, offset=header).reshape(shape)
    return torch.from_numpy(values.astype(np.uint8 if code == 8 else np.int64))


def _find(name: str, folder: Path, file: str, source: str) -> Path:
    for path in (folder / f"{file}.gz", folder / file):
        if path.is_file():
            return path
    raise missing(name, f"{file}.gz (or {file})", folder, source)


def _images(name: str, folder: Path, split: str, source: str) -> tuple[Tensor, Tensor]:
    image_file = _find(name, folder, f"{split}-images-idx3-ubyte", source)
    label_file = _find(name, folder, f"{split}-labels-idx1-ubyte", source)
    x, y = read_idx(image_file, 8, 3).unsqueeze(1), read_idx(label_file, 8, 1).long()
    if len(x) != len(y):
        raise DataError(f"{image_file} holds {len(x)} images but {label_file} holds {len(y)} labels")
    if len(y) and int(y.max()) > 9:
        raise DataError(f"{label_file} holds the label {int(y.max())}; {name} has the labels 0 to 9")
    return x, y


def _family(name: str, folder: Path, source: str, classes: tuple[str, ...], mean: float, std: float) -> Data:
    scale, shift = normalisation([mean], [std])
    train, test = (
        Dataset(x, y, classes=classes, scale=scale, shift=shift, name=name)
        for x, y in (_images(name, folder, split, source) for split in _SPLITS)
    )
    return Data(train, test)


def mnist(root: Path) -> Data:
    """Handwritten digits, 60,000 + 10,000 of 28×28."""
    return _family("mnist", root / "mnist", _MNIST, tuple("0123456789"), 0.1307, 0.3081)


def fashion_mnist(root: Path) -> Data:
    """Pieces of clothing in MNIST's format."""
    return _family("fashion-mnist", root / "fashion-mnist", _FASHION, _CLOTHES, 0.2860, 0.3530)


def mnist_writers(root: Path) -> Data:
    """MNIST with the group "writer" of each digit, from QMNIST's label files.

    Writers are numbered 0..W−1 within each of train and test, which share none; their NIST numbers are the group's
    names. QMNIST's test file is longer than MNIST's: only its first rows are used.
    """
    data = mnist(root)
    return Data(_with_writers(data.train, root, "train"), _with_writers(data.test, root, "test"))


def _with_writers(data: Dataset, root: Path, split: str) -> Dataset:
    path = _find("mnist-writers", root / "mnist-writers", f"qmnist-{split}-labels-idx2-int", _QMNIST)
    rows = read_idx(path, 12, 2)
    if len(rows) < len(data) or rows.shape[1] < 3:
        raise DataError(f"{path} holds {len(rows)} rows of {rows.shape[1]} columns for {len(data)} images")
    rows = rows[: len(data)]
    differ = int((rows[:, 0] != data.y).sum())
    if differ:
        raise DataError(f"{path} is not in the order of mnist's {split} images: {differ} digits differ")
    numbers, writer = np.unique(rows[:, 2].numpy(), return_inverse=True)
    return replace(
        data,
        groups={"writer": torch.from_numpy(writer)},
        group_names={"writer": tuple(str(number) for number in numbers)},
        name="mnist-writers",
        note="writers from QMNIST's labels",
    )
