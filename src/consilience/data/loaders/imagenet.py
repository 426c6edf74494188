"""Tiny-ImageNet: a folder of small JPEGs for each class."""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from consilience.core.errors import DataError
from consilience.data.dataset import Data, Dataset
from consilience.data.loaders.cache import Images, cached
from consilience.data.loaders.files import missing, normalisation, read_bytes

_NAME = "tiny-imagenet"
_SOURCE = "http://cs231n.stanford.edu/tiny-imagenet-200.zip (unpacked)"
_SIDE = 64
_ANNOTATIONS = "val/val_annotations.txt"


def tiny_imagenet(root: Path) -> Data:
    """200 classes of 64×64 colour photographs, 100,000 + 10,000.

    The files of tiny-imagenet-200.zip are read from tiny-imagenet/tiny-imagenet-200/, tiny-imagenet/ or
    tiny-imagenet-200/. The published test set has no labels and is not read: the validation set is the test set here.
    Classes have the order of wnids.txt and the first of their names in words.txt.
    """
    folder = _folder(root)
    ids = _lines(folder, "wnids.txt")
    words = dict(line.split("\t", 1) for line in _lines(folder, "words.txt") if "\t" in line)
    classes = tuple(words.get(wnid, wnid).split(",")[0].strip() for wnid in ids)
    scale, shift = normalisation((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821))
    sets = []
    for files, labels in (_train(folder, ids), _val(folder, ids)):
        x, y = _images(folder, files), torch.tensor(labels)
        sets.append(Dataset(x, y, classes=classes, scale=scale, shift=shift, name=_NAME))
    return Data(*sets)


def _folder(root: Path) -> Path:
    places = (root / _NAME / "tiny-imagenet-200", root / _NAME, root / "tiny-imagenet-200")
    return next((place for place in places if (place / "wnids.txt").is_file()), root / _NAME)


def _lines(folder: Path, file: str) -> list[str]:
    if not (folder / file).is_file():
        raise missing(_NAME, file, folder, _SOURCE)
    lines = [line.rstrip() for line in read_bytes(folder / file).decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{folder / file} is empty")
    return lines


def _train(folder: Path, ids: Sequence[str]) -> tuple[list[Path], list[int]]:
    files: list[Path] = []
    labels: list[int] = []
    for label, wnid in enumerate(ids):
        found = sorted((folder / "train" / wnid / "images").glob("*.JPEG"))
        if not found:
            raise missing(_NAME, f"train/{wnid}/images/{wnid}_0.JPEG", folder, _SOURCE)
        files += found
        labels += [label] * len(found)
    return files, labels


def _val(folder: Path, ids: Sequence[str]) -> tuple[list[Path], list[int]]:
    """The images of val_annotations.txt, whose lines are a file, its class and a box, with tabs between."""
    number = {wnid: label for label, wnid in enumerate(ids)}
    files: list[Path] = []
    labels: list[int] = []
    for line in _lines(folder, _ANNOTATIONS):
        name, wnid = (*line.split("\t"), "")[:2]
        if wnid not in number:
            raise DataError(f"{folder / _ANNOTATIONS} says that {name} is a {wnid!r}, which is not in wnids.txt")
        files.append(folder / "val" / "images" / name)
        labels.append(number[wnid])
    return files, labels


def _images(folder: Path, files: Sequence[Path]) -> Tensor:
    """[N, 3, 64, 64]; from the cache if the names, sizes and times of change of all files are the same."""
    seen = hashlib.sha256()
    for file in files:
        try:
            stat = file.stat()
        except OSError:
            raise missing(_NAME, str(file.relative_to(folder)), folder, _SOURCE) from None
        seen.update(f"{file.relative_to(folder)}\n{stat.st_size}\n{stat.st_mtime_ns}\n".encode())
    return cached(folder, seen.hexdigest(), len(files), partial(_decode_all, files))[0]


def _decode_all(files: Sequence[Path]) -> Images:
    images = np.empty((len(files), 3, _SIDE, _SIDE), np.uint8)
    for row, file in enumerate(files):
        try:
            with Image.open(file) as image:
                pixels = np.asarray(image.convert("RGB"))  # some are grey
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{file} is not an image that can be read ({error})") from error
        if pixels.shape != (_SIDE, _SIDE, 3):
            raise DataError(f"{file} is {pixels.shape[1]}×{pixels.shape[0]}; {_NAME} has images of {_SIDE}×{_SIDE}")
        images[row] = pixels.transpose(2, 0, 1)
    return torch.from_numpy(images), "JPEG"
