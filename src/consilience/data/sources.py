"""Tensors from the forms in which users hold data: arrays, tables, torch and Hugging Face data sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from consilience.core.errors import DataError, nearest

_DEEP = ("I;16", "I;16B", "I;16L", "I", "F")  # pillow's modes of more than eight bits a pixel
_TEXT = "OUST"  # numpy's kinds of objects and strings


def to_tensor(value: Any, what: str) -> Tensor:
    """`value` as a tensor, sharing its memory if possible. Float64 that is not a tensor gets torch's default type."""
    found = _tensor(value, what)
    if found is value or found.dtype != torch.float64:
        return found
    return found.to(torch.get_default_dtype())


def to_ids(value: Any, what: str) -> Tensor:
    """Ids of clients or groups, one for each example, as [N] int64."""
    ids = _tensor(value, what)
    if ids.dim() != 1 or (ids.is_floating_point() and not bool((ids == ids.long()).all())):
        raise DataError(f"{what} must be whole numbers [N], one for each example")
    return ids.long()


def _tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if not (hasattr(value, "__array__") or isinstance(value, Sequence | int | float)):
        raise DataError(
            f"{what} must be a tensor, an array, a table or a list of numbers, not a {type(value).__name__}: "
            "Dataset.of(…) reads a torch Dataset, a DataLoader, a DataFrame or a Hugging Face data set"
        )
    try:
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{what} must be numbers in rows of one length ({str(error).split('. ')[0]}): number names by "
            "numpy.unique(…, return_inverse=True), and make a table's columns of one type by .astype(float)"
        ) from error


@dataclass(frozen=True)
class Columns:
    """The arguments of a `Dataset`, as far as a source has them."""

    x: Any
    y: Any
    classes: tuple[str, ...] = ()
    groups: Mapping[str, Any] = field(default_factory=dict)
    group_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scale: float | None = None


def read_source(source: Any, target: str | None, inputs: str | Sequence[str] | None, groups: Sequence[str]) -> Columns:
    """Inputs and targets of a pair (x, y), a torch Dataset, a list of pairs, or an object with named columns."""
    names = getattr(source, "column_names", getattr(source, "columns", None))
    if isinstance(names, Mapping):
        raise DataError(f"the data set has several splits: pass one of them, such as data[{next(iter(names))!r}]")
    if names is not None:
        return _from_table(source, list(names), target, inputs, groups)
    if target is not None or inputs is not None or groups:
        raise DataError(f"target, inputs and groups name columns, and a {type(source).__name__} has none")
    if isinstance(source, TensorDataset):
        source = source.tensors
    if isinstance(source, tuple):
        if len(source) != 2:
            raise DataError(f"a pair (x, y) is expected, got {len(source)} parts: pass the two that you need")
        return _made(*source)
    if isinstance(source, IterableDataset) or not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise DataError(
            f"a {type(source).__name__} has no rows by index: pass a pair (x, y), a torch Dataset with a length, a "
            "DataLoader, a DataFrame or a Hugging Face data set"
        )
    return _from_examples(source)


def _from_examples(source: Any) -> Columns:
    examples = [source[i] for i in range(len(source))]
    if not examples or not all(isinstance(example, tuple | list) and len(example) == 2 for example in examples):
        found = type(examples[0]).__name__ if examples else "none"
        raise DataError(
            f"every example of a {type(source).__name__} must be a pair (x, y), found {found}: "
            "pass Dataset(x, y) with tensors"
        )
    x, y = zip(*examples, strict=True)
    return _made(x, y, tuple(map(str, getattr(source, "classes", ()))))


def _from_table(
    source: Any, names: list[str], target: str | None, inputs: str | Sequence[str] | None, groups: Sequence[str]
) -> Columns:
    if target is None:
        raise DataError(
            f"say which column to predict: Dataset.of(table, target={names[-1]!r}); it has {', '.join(map(str, names))}"
        )
    inputs = [inputs] if isinstance(inputs, str) else inputs
    chosen = [name for name in names if name != target and name not in groups] if inputs is None else list(inputs)
    for name in (target, *chosen, *groups):
        if name not in names:
            raise DataError(f"there is no column {name!r}; {nearest(str(name), map(str, names))}")
    if not chosen:
        raise DataError(f"there is no column of inputs beside {target!r}")
    features = getattr(source, "features", None)  # of Hugging Face, whose ClassLabel has names
    known = getattr(features[target], "names", ()) if isinstance(features, Mapping) else ()
    numbered = {name: _numbered(_values(source[name]), f"column {name!r}") for name in groups}
    x = _values(source[chosen[0]])
    if len(chosen) > 1 or not _has_cells(x):
        x = np.stack([_numbers(_values(source[name]), name) for name in chosen], axis=1)
    return _made(
        x,
        _values(source[target]),
        tuple(known or ()),
        groups={name: ids for name, (ids, _) in numbered.items()},
        group_names={name: values for name, (_, values) in numbered.items()},
    )


def _made(x: Any, y: Any, classes: tuple[str, ...] = (), **more: Any) -> Columns:
    """Images become bytes, to be scaled to 0..1; names become numbers of classes; real targets [N] become [N, 1]."""
    x, y, scale = _values(x), _values(y), None
    if isinstance(x, list) and x and isinstance(x[0], Image):
        x, scale = _stacked([pixels_of(image, "an image") for image in x]), 1 / 255
    if _is_text(y):
        y, classes = _numbered(y, "the target")
    y = to_tensor(y, "targets")
    return Columns(x, y.unsqueeze(1) if y.dim() == 1 and y.is_floating_point() else y, classes, scale=scale, **more)


def pixels_of(image: Image, what: str) -> Any:
    """An image as bytes [C, H, W], grey or in colours."""
    if image.mode in _DEEP:
        raise DataError(f"{what} has more than eight bits a pixel: convert all images to eight bits in the same way")
    pixels = np.array(image.convert("L" if image.mode in ("1", "L") else "RGB"))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _values(column: Any) -> Any:
    """A column as an array, a tensor, or a list of images or numbers."""
    if isinstance(column, Tensor):
        return column
    if hasattr(column, "__array__"):
        array = np.asarray(column)
        if array.dtype != object:
            return array
        column = array.tolist()
    values = list(column)
    return _stacked(values) if values and isinstance(values[0], Tensor | np.ndarray) else values


def _stacked(values: Sequence[Any]) -> Tensor:
    if len(shapes := {tuple(value.shape) for value in values}) > 1:
        first, other = sorted(shapes)[:2]
        raise DataError(f"examples must have one shape, found {first} and {other}: crop or pad them first")
    return torch.stack([torch.as_tensor(value) for value in values])


def _has_cells(column: Any) -> bool:
    """True if a column holds images, vectors or lists instead of numbers."""
    if isinstance(column, list):
        return bool(column) and (isinstance(column[0], Image) or np.ndim(column[0]) > 0)
    return len(column.shape) > 1


def _numbers(column: Any, name: str) -> Any:
    try:
        return np.asarray(column, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"column {name!r} holds values that are not numbers: encode it, such as by pandas.get_dummies, or choose "
            "other columns by inputs="
        ) from error


def _is_text(column: Any) -> bool:
    return bool(len(column)) and not isinstance(column, Tensor) and np.asarray(column).dtype.kind in _TEXT


def _numbered(column: Any, what: str) -> tuple[Tensor, tuple[str, ...]]:
    """Numbers 0, 1, … in the order of the sorted values, and the values as names."""
    if any(value is None or value != value for value in column):
        raise DataError(f"{what} has missing values: fill them in or drop the rows first")
    names, ids = np.unique(np.asarray(column), return_inverse=True)
    return torch.from_numpy(ids), tuple(map(str, names.tolist()))
