"""Tensors from the forms in which users hold data: arrays, tables, torch and Hugging Face data sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from consilience.core.errors import DataError, nearest
from consilience.data.columns import column_input, column_values
from consilience.data.ragged import Ragged
from consilience.data.rows import Rows
from consilience.data.stored import file_map
from consilience.data.tensors import IGNORED, to_tensor

_TEXT = "OUST"  # numpy's kinds of objects and strings


@dataclass(frozen=True)
class Columns:
    """The arguments of a `Dataset`, as far as a source has them."""

    x: Any
    y: Any
    classes: tuple[str, ...] = ()
    groups: Mapping[str, Any] = field(default_factory=dict)
    group_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scale: float | None = None
    features: tuple[str, ...] = ()


def read_source(
    source: Any, target: str | None, inputs: str | Sequence[str] | None, groups: Sequence[str], lazy: bool = False
) -> Columns:
    """Inputs and targets of a pair (x, y), a torch Dataset, a list of pairs, or an object with named columns, whose
    inputs are read by index if `lazy`."""
    names = getattr(source, "column_names", getattr(source, "columns", None))
    if isinstance(names, Mapping):
        raise DataError(f"the data set has several splits: pass one of them, such as data[{next(iter(names))!r}]")
    if lazy and not isinstance(source, pa.Table) and not hasattr(source, "column_names"):
        raise DataError(
            f"lazy is for a Hugging Face data set or a pyarrow table, not for a {type(source).__name__}: pass "
            "Dataset(x, y) with x = cs.Rows(…), or leave lazy out"
        )
    if names is not None:
        return _from_table(source, list(names), target, inputs, groups, lazy)
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
    x, y = map(list, zip(*examples, strict=True))
    return _made(_transposed(x), y, tuple(map(str, getattr(source, "classes", ()))))


def _transposed(examples: list[Any]) -> Any:
    """Examples that are tuples or dicts as one tuple or dict of columns. A tuple of numbers is a vector."""
    first = examples[0]
    if isinstance(first, Mapping):
        if not all(isinstance(example, Mapping) and example.keys() == first.keys() for example in examples):
            raise DataError(f"all examples must have the keys of the first, {', '.join(map(str, first))}")
        return {key: [example[key] for example in examples] for key in first}
    if isinstance(first, tuple) and not all(isinstance(part, int | float) for part in first):
        if not all(isinstance(example, tuple) and len(example) == len(first) for example in examples):
            raise DataError(f"all examples must have {len(first)} inputs, as the first has")
        return tuple(map(list, zip(*examples, strict=True)))
    return examples


def _from_table(
    source: Any, names: list[str], target: str | None, inputs: str | Sequence[str] | None, groups: Sequence[str],
    lazy: bool,
) -> Columns:  # fmt: skip
    if target is None:
        raise DataError(
            f"say which column to predict: Dataset.of(table, target={names[-1]!r}); it has {', '.join(map(str, names))}"
        )
    inputs = [inputs] if isinstance(inputs, str) else inputs
    chosen = [name for name in names if name != target and name not in groups] if inputs is None else list(inputs)
    known_names = set(names)
    for name in (target, *chosen, *groups):
        if name not in known_names:
            raise DataError(f"there is no column {name!r}; {nearest(str(name), map(str, names))}")
    if not chosen:
        raise DataError(f"there is no column of inputs beside {target!r}")
    features = getattr(source, "features", None)  # of Hugging Face, whose ClassLabel has names
    known = getattr(features[target], "names", ()) if isinstance(features, Mapping) else ()
    numbered = {name: _numbered(column_values(source[name]), f"column {name!r}") for name in groups}
    columns = {name: Rows(source, name) if lazy else column_values(source[name]) for name in chosen}
    x: Any = columns
    numeric: tuple[str, ...] = ()
    if not any(map(_has_cells, columns.values())):
        numeric = tuple(map(str, columns))
        x = Rows(source, chosen) if lazy else np.stack([_numbers(columns[name], name) for name in chosen], axis=1)
    elif len(columns) == 1:
        (x,) = columns.values()
    elif lazy:
        x = {name: Rows(source, name, factor=1 / 255) if rows.images else rows for name, rows in columns.items()}
    found = _made(
        x,
        source[target],
        tuple(known or ()),
        groups={name: ids for name, (ids, _) in numbered.items()},
        group_names={name: values for name, (_, values) in numbered.items()},
        features=numeric,
    )
    return replace(found, scale=1 / 255) if isinstance(x, Rows) and x.images else found


def _made(x: Any, y: Any, classes: tuple[str, ...] = (), **more: Any) -> Columns:
    """Images become bytes, to be scaled to 0..1, or numbers in 0..1 if there are other inputs; names become numbers of
    classes; real targets [N] become [N, 1]."""
    given, y, scale = y, y if isinstance(y, Rows) else column_values(y), None
    if isinstance(x, Mapping):
        x = {name: _scaled(_input(column)) for name, column in x.items()}
    elif isinstance(x, tuple):
        x = tuple(_scaled(_input(column)) for column in x)
    else:
        x, scale = _input(x)
    if not isinstance(y, Ragged | Rows):
        if _is_text(y):
            y, classes = _numbered(y, "the target")
        y = to_tensor(y, "targets")
        y = y.unsqueeze(1) if y.dim() == 1 and y.is_floating_point() else y
    elif isinstance(y, Ragged) and y is not given and not y.is_floating_point():
        y = Ragged.from_values(y.values.long(), y.offsets, padding=IGNORED)
    return Columns(x, y, classes, scale=scale, **more)


def _input(column: Any) -> tuple[Any, float | None]:
    """(a column of inputs, its scale); what is read by index stays as it is."""
    return (column, None) if isinstance(column, Rows) or file_map(column)[0] else column_input(column)


def _scaled(column: tuple[Any, float | None]) -> Any:
    values, scale = column
    return values if scale is None else values * scale


def _has_cells(column: Any) -> bool:
    """True if a column holds images, vectors or lists instead of numbers."""
    if isinstance(column, Ragged):
        return True
    if isinstance(column, Rows):
        return column.dim() > 1
    if isinstance(column, list):
        return bool(column) and (isinstance(column[0], Image) or np.ndim(column[0]) > 0)
    return len(column.shape) > 1


def _numbers(column: Any, name: str) -> Any:
    try:
        return np.asarray(column, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"column {name!r} holds values that are not numbers: use cs.Federation.from_tables, which prepares such "
            "columns alike at all sites, or choose other columns by inputs="
        ) from error


def _is_text(column: Any) -> bool:
    return bool(len(column)) and not isinstance(column, Tensor) and np.asarray(column).dtype.kind in _TEXT


def _numbered(column: Any, what: str) -> tuple[Tensor, tuple[str, ...]]:
    """Numbers 0, 1, … in the order of the sorted values, and the values as names."""
    if any(value is None or value != value for value in column):
        raise DataError(f"{what} has missing values: fill them in or drop the rows first")
    names, ids = np.unique(np.asarray(column), return_inverse=True)
    return torch.from_numpy(ids), tuple(map(str, names.tolist()))
