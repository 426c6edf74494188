"""A site's own data, in the forms in which places keep them: tables, folders of images, arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from consilience.core.errors import DataError, nearest
from consilience.data.dataset import Data, Dataset
from consilience.data.federation import Federation
from consilience.data.loaders.files import normalisation
from consilience.data.loaders.silos import CSV, Table, agreed_scale, in_order, own_scale, read_table

_TEST = "test"
_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
_DEEP = ("I;16", "I;16B", "I;16L", "I", "F")  # pillow's modes of more than eight bits a pixel
Part = tuple[Tensor, Tensor]  # x, y


@dataclass(frozen=True)
class _Meaning:
    """What the columns of tables and the targets of all forms are."""

    classes: tuple[str, ...]
    target: str
    features: Sequence[str] | None
    scaling: Mapping[str, Mapping[str, float]] | None


def read_site(
    path: str | Path,
    *,
    classes: Sequence[str] = (),
    target: str = "target",
    features: Sequence[str] | None = None,
    scaling: Mapping[str, Mapping[str, float]] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    holdout: float = 0.0,
    seed: int = 0,
    name: str | None = None,
) -> Dataset | Data:
    """What one place holds. `path` is

    - a CSV file, or a folder of CSV files whose rows are put together; rows of its `test.csv`, or of files in `test/`,
      are held out;
    - a folder with a folder of images for each class, all of one size, grey or in colours; likewise `test/`;
    - a .npz or .safetensors file with arrays x and y, and x_test and y_test if there are any.

    Every place must read its data alike, so all but the path should come from one config. `classes` are the names of
    all classes, in the order of their numbers; targets are names, or else numbers 0, 1, … where no name is a number
    itself. Without classes targets are real.

    Of tables, `target` is the column to predict and all others are features, numbers without gaps, in the order of
    `features`, or of their names. `scaling` has a line a feature, such as `age = { centre = 54, spread = 9 }`, from a
    code book: (x − centre)/spread. Without it features are standardised by the mean and deviation of this place's own
    training rows (before any is held out): nothing has to be agreed on, but differences in level between places are
    lost. Images become (x/255 − mean)/std, a figure a channel. Arrays are taken as they are, but for bytes, which are
    images.

    `holdout` is the share of rows to score the model on, where no test rows are given; which ones, `seed` decides.
    """
    path = Path(path).expanduser()
    reader = _reader(path)
    if reader is not _tables and (features is not None or scaling is not None):
        raise DataError(f"{path}: features and scaling are for tables")
    if reader is _tables and (mean is not None or std is not None):
        raise DataError(f"{path}: mean and std are for images; a table's features have scaling")
    if not 0 <= holdout < 1:
        raise DataError(f"the share to hold out must lie between 0 and 1, got {holdout}")
    train, test = reader(path, _Meaning(tuple(classes), target, features, scaling))
    for _, y in (train, test or train):
        if y.is_floating_point() and not bool(y.isfinite().all()):
            raise DataError(f"{path}: there are targets that are not finite")
    scale, shift = _scaled(path, train[0], mean, std)
    whole = Dataset(*train, classes=tuple(classes), scale=scale, shift=shift, name=name or path.stem)
    if test is not None:
        if test[0].shape[1:] != whole.x.shape[1:] or test[0].dtype != whole.x.dtype:
            raise DataError(f"{path}: test examples are of another shape or type than the others")
        return Data(whole, replace(whole, x=test[0], y=test[1]))
    if not holdout:
        return whole
    alone = Federation.from_owner(whole, torch.zeros(len(whole), dtype=torch.int64))
    return Data(*(part.client(0) for part in alone.split(holdout, seed=seed)))


def _reader(path: Path) -> Callable[[Path, _Meaning], tuple[Part, Part | None]]:
    if path.suffix.lower() == ".csv":
        return _tables
    if path.suffix.lower() in (".npz", ".safetensors"):
        return _arrays
    if not path.is_dir():
        what = "is none of these" if path.exists() else "is not there"
        raise DataError(f"a CSV file, a folder, a .npz or a .safetensors file is expected, and {path} {what}")
    return _tables if any(path.glob(CSV)) else _pictures


# Tables


def _tables(path: Path, meaning: _Meaning) -> tuple[Part, Part | None]:
    held_out: list[Path] = []
    files = [path]
    if path.is_dir():
        tables = sorted(path.glob(CSV))
        files = [file for file in tables if file.stem.lower() != _TEST]
        held_out = [file for file in tables if file not in files] + sorted((path / _TEST).glob(CSV))
        if not files:
            raise DataError(f"{path} has test rows, but no CSV file to learn from")
    train, test = ([read_table(file, meaning.target) for file in part] for part in (files, held_out))
    features = meaning.features or sorted(train[0].features)
    others = str(train[0].path) if meaning.features is None else "the federation's"
    train, test = ([in_order(table, features, others) for table in part] for part in (train, test))
    x = torch.cat([table.x for table in train])
    scaling = meaning.scaling
    centre, spread = own_scale(x) if scaling is None else agreed_scale(scaling, features, "site.scaling")

    def part(tables: list[Table]) -> Part:
        x = torch.cat([table.x for table in tables])
        return ((x - centre) / spread).float(), torch.cat([_targets(table, meaning.classes) for table in tables])

    return part(train), part(test) if test else None


def _targets(table: Table, classes: tuple[str, ...]) -> Tensor:
    """[N] numbers of classes, or [N, 1] real."""
    if classes:
        return _numbers(table.targets, classes, str(table.path))
    try:
        return torch.tensor([[float(text)] for text in table.targets])
    except ValueError:
        raise DataError(
            f"{table.path}: targets must be numbers, for no classes are given: federation.classes in the config"
        ) from None


def _numbers(labels: Sequence[str], classes: tuple[str, ...], where: str) -> Tensor:
    """Labels as numbers of classes. Numbers may stand for names unless names are numbers: 1 would be two things."""
    plain = [_plain(label) for label in labels]
    code = {_plain(name): number for number, name in enumerate(classes)}
    if not any(name.isdecimal() for name in code) and all(label.isdecimal() for label in plain):
        code = {str(number): number for number in range(len(classes))}
    for label in plain:
        if label not in code:
            raise DataError(f"{where}: {label!r} is no class of this federation; {nearest(label, code)}")
    return torch.tensor([code[label] for label in plain], dtype=torch.int64)


def _plain(label: str) -> str:
    """Whole numbers in one spelling: programs write 1 as 1.0 or 01."""
    try:
        return str(int(float(label))) if float(label).is_integer() else label
    except ValueError:
        return label


# Folders of images


def _pictures(path: Path, meaning: _Meaning) -> tuple[Part, Part | None]:
    classes = meaning.classes
    if not classes:
        raise DataError(
            f"{path} is a folder without CSV files: for images, class names are needed (federation.classes)"
        )
    apart = path / _TEST if _TEST not in classes and (path / _TEST).is_dir() else None
    return _classes(path, classes, apart), None if apart is None else _classes(apart, classes, None)


def _classes(path: Path, classes: tuple[str, ...], apart: Path | None) -> Part:
    images: list[Tensor] = []
    labels: list[int] = []
    first = None
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir() and entry != apart):
        if folder.name not in classes:
            raise DataError(f"{folder} is no class of this federation; {nearest(folder.name, classes)}")
        for file in sorted(file for file in folder.iterdir() if file.suffix.lower() in _IMAGES):
            image, first = _decoded(file), first or file
            if images and image.shape != images[0].shape:
                this, that = (" × ".join(str(n) for n in one.shape) for one in (image, images[0]))
                raise DataError(f"images must be of one size and kind: {file} is {this}, {first} is {that}")
            images.append(image)
            labels.append(classes.index(folder.name))
    if not images:
        raise DataError(f"{path} has neither CSV files nor folders with images in them")
    return torch.stack(images), torch.tensor(labels)


def _decoded(file: Path) -> Tensor:
    """[channels, height, width] bytes."""
    try:
        with Image.open(file) as image:
            if image.mode in _DEEP:
                raise DataError(
                    f"{file} has more than eight bits a pixel: bring it to eight, the same way at all sites"
                )
            pixels = np.array(image.convert("L" if image.mode in ("1", "L") else "RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{file} is not an image that can be read ({error})") from error
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy())


# Arrays


def _arrays(path: Path, meaning: _Meaning) -> tuple[Part, Part | None]:
    arrays = _stored(path)
    for name in ("x", "y"):
        if name not in arrays:
            raise DataError(f"{path} has no array {name!r}; it has {', '.join(sorted(arrays)) or 'none'}")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{path} has one of x_test and y_test, but not the other")
    parts = [
        (_inputs(arrays[f"x{end}"], path), _outputs(arrays[f"y{end}"], meaning.classes, path))
        for end in ("", "_test")
        if f"x{end}" in arrays
    ]
    return parts[0], parts[1] if len(parts) > 1 else None


def _stored(path: Path) -> dict[str, Any]:
    try:
        if path.suffix.lower() == ".safetensors":
            return dict(load_file(path))
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _inputs(x: Any, path: Path) -> Tensor:
    tensor = _tensor(x, path)
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        return tensor.float()
    return tensor if tensor.dtype == torch.uint8 else tensor.long()


def _outputs(y: Any, classes: tuple[str, ...], path: Path) -> Tensor:
    if isinstance(y, np.ndarray) and y.dtype.kind == "U":
        return _numbers([str(label) for label in y], classes, str(path))
    tensor = _tensor(y, path)
    if not classes:
        return tensor if tensor.dtype == torch.uint8 else tensor.float().reshape(len(tensor), -1)
    if tensor.is_floating_point() or tensor.dim() != 1:
        raise DataError(f"{path}: y must be [N] class names or whole numbers, for there are classes")
    labels = tensor.long()
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        raise DataError(
            f"{path}: y lies in {int(labels.min())}..{int(labels.max())}, but there are {len(classes)} classes, "
            f"0..{len(classes) - 1}"
        )
    return labels


def _tensor(array: Any, path: Path) -> Tensor:
    if isinstance(array, Tensor):
        return array
    try:
        return torch.from_numpy(np.ascontiguousarray(array))
    except TypeError as error:
        raise DataError(f"{path} holds an array of {array.dtype}, not of numbers") from error


def _scaled(
    path: Path, x: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[Tensor | None, Tensor | None]:
    """(scale, shift) of bytes: x · scale + shift = (x/255 − mean)/std."""
    if x.dtype != torch.uint8 or x.dim() != 4:
        if mean is not None or std is not None:
            raise DataError(f"{path}: mean and std are for images of bytes [channels, height, width]")
        return (torch.tensor(1 / 255), None) if x.dtype == torch.uint8 else (None, None)
    channels = x.shape[1]
    centre, spread = list(mean or [0.0] * channels), list(std or [1.0] * channels)
    if not len(centre) == len(spread) == channels:
        raise DataError(f"{path}: images have {channels} channels, mean {len(centre)} and std {len(spread)} figures")
    if not all(figure > 0 for figure in spread):
        raise DataError(f"{path}: every std must be positive")
    return normalisation(centre, spread)
