"""Arrays x and y in a .npz or .safetensors file, and class names as numbers.

Several inputs are arrays x.0, x.1, … or x.name. With an array of offsets, such as x.name.offsets, the rows of an array
differ in length and lie one after another in it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from consilience.core.errors import DataError
from consilience.core.records import Tree
from consilience.data.ragged import Ragged
from consilience.data.tables.labels import class_numbers
from consilience.data.tensors import IGNORED
from consilience.data.trees import Entry, map_entries

_OFFSETS = ".offsets"


def read_arrays(path: Path, classes: Sequence[str]) -> list[tuple[Tree, Tree]]:
    """The pair x, y of a file and, if it has one, the pair x_test, y_test."""
    arrays = _stored(path)
    groups = {name: _tree(arrays, name, path) for name in ("x", "y", "x_test", "y_test")}
    for name in ("x", "y"):
        if groups[name] is None:
            raise DataError(f"{path} has no array {name!r}; it has {', '.join(sorted(arrays)) or 'none'}")
    if (groups["x_test"] is None) != (groups["y_test"] is None):
        raise DataError(f"{path} has one of x_test and y_test, but not the other")
    return [
        (
            map_entries(lambda x: _entry(x, path, lambda values: _inputs(values, path)), groups[f"x{end}"]),
            map_entries(
                lambda y: _entry(y, path, lambda values: _targets(values, classes, path), IGNORED), groups[f"y{end}"]
            ),
        )
        for end in ("", "_test")
        if groups[f"x{end}"] is not None
    ]


def _tree(arrays: dict[str, Any], name: str, path: Path) -> Tree:
    """The array `name`, or the arrays name.0, name.1, … as a tuple, or name.key as a dict; each entry is a list of the
    values and, if there are any, the offsets. None if there are no such arrays."""

    def entry(where: str) -> list[Any]:
        return [arrays[end] for end in (where, where + _OFFSETS) if end in arrays]

    parts = [key for key in arrays if key.startswith(f"{name}.") and not key.endswith(_OFFSETS)]
    if name in arrays and parts:
        raise DataError(f"{path} has an array {name!r} and also {parts[0]!r}: either one input, or several")
    if name in arrays or not parts:
        return entry(name) if name in arrays else None
    found = {key.removeprefix(f"{name}."): entry(key) for key in parts}
    numbers = [str(i) for i in range(len(found))]
    return tuple(found[i] for i in numbers) if set(found) == set(numbers) else found


def _entry(stored: list[Any], path: Path, read: Callable[[Any], Tensor], padding: int = 0) -> Entry:
    values, *offsets = stored
    if not offsets:
        return read(values)
    column = read(values)
    try:
        fill = 0 if column.is_floating_point() or column.dtype == torch.uint8 else padding
        return Ragged.from_values(column, _tensor(offsets[0], path), padding=fill)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


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


def _targets(y: Any, classes: Sequence[str], path: Path) -> Tensor:
    if isinstance(y, np.ndarray) and y.dtype.kind == "U":
        return class_numbers([str(label) for label in y], classes, str(path))
    tensor = _tensor(y, path)
    if not classes:
        return tensor if tensor.dtype == torch.uint8 else tensor.float().reshape(len(tensor), -1)
    if tensor.is_floating_point() or tensor.dim() != 1:
        raise DataError(f"{path}: y must be [N] class names or whole numbers, because there are classes")
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
