"""EMNIST by writer: LEAF's images of digits and letters, as published by TFF or Hugging Face."""

import string
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from consilience.core.errors import DataError
from consilience.data.dataset import Data, Dataset
from consilience.data.loaders.files import common_names, missing, normalisation
from consilience.data.loaders.hdf5 import Array, read_clients
from consilience.data.loaders.parquet import find_shards, image_parquet, shards
from consilience.data.loaders.tables import hold_out

_NAME = "emnist-62"
_CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
_TFF = "https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2"
_HUGGING_FACE = "https://huggingface.co/datasets/flwrlabs/femnist"


def emnist62(root: Path) -> Data:
    """Handwritten digits, capital and small letters, 28×28, by some 3,400 writers (group "writer"): TFF's HDF5 files,
    or Hugging Face's parquet files, of which a fixed tenth of each writer's images (rounded down) is the test set.

    Ink is 255 on 0, as in MNIST; inputs lie in [0, 1]. Writers have the same numbers in train and test. The two forms
    are not the same images: TFF's has 671,585 + 77,483 of them, Hugging Face's 814,277.
    """
    folder = root / _NAME
    if any(folder.glob("fed_emnist_*.h5")):
        return _tff(folder)
    if find_shards(folder, "train"):
        return _hugging_face(folder)
    raise missing(
        _NAME, "fed_emnist_train.h5 (or train-00000-of-00001.parquet)", folder, f"{_TFF} (or {_HUGGING_FACE})"
    )


def _tff(folder: Path) -> Data:
    files = [folder / f"fed_emnist_{split}.h5" for split in ("train", "test")]
    for file in files:
        if not file.is_file():
            raise missing(_NAME, file.name, folder, _TFF)
    train, test = (
        {
            writer: _converted(f"{file}: client {writer!r}", pixels, label)
            for writer, (pixels, label) in read_clients(file, ("pixels", "label"))
        }
        for file in files
    )
    names, all_names = common_names(list(train), list(test))
    return Data(_joined(train, names), _joined(test, all_names))


def _joined(writers: Mapping[str, tuple[Tensor, Tensor]], names: tuple[str, ...]) -> Dataset:
    scale, shift = normalisation([0.0], [1.0])
    number = {name: i for i, name in enumerate(names)}
    sizes = torch.tensor([len(y) for _, y in writers.values()])
    return Dataset(
        torch.cat([x for x, _ in writers.values()]),
        torch.cat([y for _, y in writers.values()]),
        classes=_CLASSES,
        groups={"writer": torch.tensor([number[writer] for writer in writers]).repeat_interleave(sizes)},
        group_names={"writer": names},
        scale=scale,
        shift=shift,
        name=_NAME,
        note="ink 255 on 0, as in MNIST (TFF has 0 on 1)",
    )


def _converted(where: str, pixels: Array, label: Array) -> tuple[Tensor, Tensor]:
    if pixels.shape[1:] != (28, 28) or pixels.dtype.kind != "f":
        sizes = " × ".join(map(str, pixels.shape[1:]))
        raise DataError(f"{where} must have 'pixels' of 28 × 28 floats, found {sizes or 'single'} {pixels.dtype}")
    if label.ndim != 1 or label.dtype.kind not in "iu":
        raise DataError(f"{where} must have 'label' of one integer an image, found {label.dtype} in {label.ndim}-d")
    if not ((pixels >= 0) & (pixels <= 1)).all():  # also false for NaN
        raise DataError(f"{where} has pixels outside 0 (ink) to 1 (background)")
    y = torch.from_numpy(label.astype(np.int64))
    _check_labels(where, y)
    ink = np.rint((1 - pixels) * 255).astype(np.uint8)
    return torch.from_numpy(ink).unsqueeze(1), y


def _check_labels(where: str, y: Tensor) -> None:
    wrong = y[(y < 0) | (y >= len(_CLASSES))]
    if len(wrong):
        raise DataError(f"{where} holds the label {int(wrong[0])}; {_NAME} has the labels 0 to {len(_CLASSES) - 1}")


def _hugging_face(folder: Path) -> Data:
    files = shards(folder, "train", _HUGGING_FACE)
    data = image_parquet(files, label="character", groups={"writer": "writer_id"}, name=_NAME)
    if data.x.shape[1:] != (1, 28, 28):
        size = " × ".join(str(n) for n in data.x.shape[1:])
        raise DataError(f"{files[0]} is not {_NAME}: it holds images of {size}")
    _check_labels(str(files[0]), data.y)
    # Most of an image is background: LEAF has it white.
    x = 255 - data.x if data.x.numpy().mean() > 127.5 else data.x
    note = "; ".join(filter(None, ["ink 255 on 0, as in MNIST; a tenth of each writer held out", data.note]))
    data = replace(data, x=x, classes=data.classes or _CLASSES, note=note)
    return hold_out(data, data.groups["writer"], 0.1)
