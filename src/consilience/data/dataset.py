"""Dataset: the examples as tensors, and the constants that turn stored rows into model inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from consilience.core.display import clip, facts
from consilience.core.errors import DataError
from consilience.core.records import Tree, rows, tree_map
from consilience.core.text import plural
from consilience.data.ragged import Ragged
from consilience.data.read_ahead import read_ahead
from consilience.data.rows import Rows
from consilience.data.sources import read_source
from consilience.data.tables.preparation import Preparation
from consilience.data.tensors import to_ids, to_tensor
from consilience.data.trees import (
    Entry,
    Widths,
    batch_of,
    by_index,
    check_names,
    entries,
    form,
    in_dtype,
    map_entries,
    tensors,
    to_tree,
    widths,
)

Source = Any
"""A Dataset, or anything that `Dataset.of` reads."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """N examples. Images are stored as uint8 and become inputs batch by batch: `x.float() * scale + shift`, with scale
    and shift broadcast against one example.

    `x` is one tensor, a tuple of tensors, or a dict of tensors, all with N rows: the arguments of the module, by
    position or by name. Any of them may be `Ragged`, which has rows of different lengths and is padded in a batch, or
    `Rows`, which are read by index when a batch needs them. A memory map of NumPy in x is read by index too.
    `scale` and `shift` are for one tensor.

    `y` is [N] int64 for classes, [N, D] float for regression, [N, L] float or uint8 in {0, 1} for multi-label.
    A target for each place of a sequence is `Ragged`, padded with a value that the loss ignores.
    `groups` holds further columns [N] int64 (writer, hospital, coarse label) with their names, if any.
    `features` are the names of the columns of x [N, F], if they have names, and `preparation` is how they were made
    from a table: predictions can then be made for tables with the same columns.

    Arrays, tables and lists of numbers become tensors, those of float64 in torch's default type; a tensor keeps its
    type. Labels [N] of any integer type, or bool, become int64. Inputs of integers are bytes or token ids: convert
    features by `.astype(float)`. `Dataset.of` reads other sources.

    `len(data)` is N; `data[i]` is the pair of a model input and a target; `data[index]`, with a slice, a tensor of
    indices or a mask, is a Dataset of these rows.
    """

    x: Tree
    y: Tree
    _: KW_ONLY
    classes: tuple[str, ...] = ()
    groups: Mapping[str, Tensor] = field(default_factory=dict)
    group_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    scale: Tensor | None = None
    shift: Tensor | None = None
    name: str = "data"
    note: str = ""
    preparation: Preparation | None = None

    @classmethod
    def of(
        cls,
        source: Any,
        *,
        target: str | None = None,
        inputs: str | Sequence[str] | None = None,
        groups: Sequence[str] = (),
        name: str | None = None,
        lazy: bool = False,
    ) -> Dataset:
        """A Dataset from a pair (x, y), a torch Dataset, a DataLoader (its data set, not its batches), a DataFrame or a
        Hugging Face data set.

        Of a source with columns, `target` is the column to predict, `groups` are columns of ids or names, such as
        hospital, and `inputs` are the columns of features, by default all others. If one of several columns holds
        images, vectors or lists, x is a dict by the columns' names. Names of classes are numbered in their sorted
        order. Images become inputs from 0 to 1. Lists and arrays of different lengths become `Ragged`, padded with 0;
        as targets of whole numbers, with −100, which torch's cross-entropy ignores.

        An example of a torch Dataset is a pair of inputs and a target. Its inputs may be a tuple or a dict.

        With `lazy`, the inputs of a Hugging Face data set or a pyarrow table stay where they are, as `Rows`; targets
        and groups are held in memory.
        """
        if isinstance(source, DataLoader):
            source = source.dataset
        if isinstance(source, Dataset):
            return source if name is None else replace(source, name=name)
        if isinstance(source, Data):
            raise DataError("a Data has two data sets: pass its .train or its .test")
        found = read_source(source, target, inputs, groups, lazy)
        columns = {column.name: getattr(found, column.name) for column in fields(found)}
        return cls(**columns, name=name or "data")

    def __post_init__(self) -> None:
        scales = {what: value for what, value in (("scale", self.scale), ("shift", self.shift)) if value is not None}
        found = {name: to_tensor(value, f"{self.name}: {name}") for name, value in scales.items()}
        found |= {name: to_tree(getattr(self, name), f"{self.name}: ", name, name == "x") for name in ("x", "y")}
        found["y"] = map_entries(_labels, found["y"])
        groups = {name: to_ids(column, f"{self.name}: group {name!r}") for name, column in self.groups.items()}
        names = {name: tuple(map(str, getattr(self, name))) for name in ("classes", "features")}
        for name, value in {**found, "groups": groups, **names}.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        (first, _), *_rest = self._entries()
        for what, column in (*self._entries(), *self.groups.items()):
            if len(column) != len(self):
                raise DataError(f"{self.name}: {first} has {len(self)} rows but {what} has {len(column)}")
        for what, column in self._entries():
            if isinstance(column, Rows):
                continue  # they are checked when they are read
            values = column.values if isinstance(column, Ragged) else column
            if values.is_floating_point() and not bool(torch.isfinite(values).all()):
                raise DataError(f"{self.name}: {what} holds values that are not finite; fill or drop them first")
        for what in ("x", "y"):
            check_names(getattr(self, what), f"{self.name}: {what}")
        if self.features and not (isinstance(self.x, Tensor | Rows) and self.x.shape[1:] == (len(self.features),)):
            raise DataError(f"{self.name}: features has {plural(len(self.features), 'name')}, but x is {form(self.x)}")
        if not (self.scale is None and self.shift is None) and not isinstance(self.x, Tensor | Rows):
            raise DataError(f"{self.name}: scale and shift are for x of one tensor: scale the entries of x beforehand")
        if self.classes and self.labels is not None and len(self):
            low, high, count = int(self.labels.min()), int(self.labels.max()), len(self.classes)
            if not 0 <= low <= high < count:
                raise DataError(
                    f"{self.name}: labels lie in {low}..{high}, but classes has {plural(count, 'name')} "
                    f"(labels 0..{count - 1} are allowed)"
                )

    def _entries(self) -> list[tuple[str, Entry]]:
        return [*entries(self.x, "x"), *entries(self.y, "y")]

    @property
    def labels(self) -> Tensor | None:
        """y if it holds class labels [N], else None."""
        y = self.y
        return y if isinstance(y, Tensor) and y.dim() == 1 and not y.is_floating_point() else None

    @property
    def device(self) -> torch.device:
        """Where the examples are stored."""
        return self._entries()[0][1].device

    @property
    def widths(self) -> dict[str, int]:
        """The longest row of every `Ragged` entry by its name, such as x.tokens: `inputs(…, width=data.widths)` has one
        shape for any rows."""
        return widths(self.x, "x") | widths(self.y, "y")

    def __len__(self) -> int:
        return len(self._entries()[0][1])

    @overload
    def __getitem__(self, index: int) -> tuple[Tree, Tree]: ...

    @overload
    def __getitem__(self, index: slice | Tensor | Sequence[int]) -> Dataset: ...

    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> Dataset | tuple[Tree, Tree]:
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"{self.name} has {plural(len(self), 'example')}, and no index {index}")
            row = torch.tensor([index % len(self)], device=self.device)
            return rows(self.inputs(row), 0), rows(self.targets(row), 0)
        index = torch.arange(len(self), device=self.device)[index]  # a copy also of a slice, not a view of all rows
        return self._mapped(lambda column: column[index])

    def __repr__(self) -> str:
        parts = [plural(len(self), "example"), f"x {form(self.x)}", f"y {form(self.y)}"]
        parts += [f"{len(self.classes):,} classes"] if self.classes else []
        return f"Dataset({clip(self.name, 60)}: {', '.join(parts)})"

    def _repr_html_(self) -> str:
        few = ", ".join(self.classes[:12]) + (", …" if len(self.classes) > 12 else "")
        return facts(
            f"Dataset {self.name}",
            [
                ("examples", f"{len(self):,}"),
                ("inputs", form(self.x)),
                ("targets", form(self.y)),
                ("classes", f"{len(self.classes):,}: {few}" if self.classes else ""),
                ("columns", ", ".join(self.groups)),
                ("note", self.note),
            ],
        )

    def inputs(self, index: Tensor, dtype: torch.dtype = torch.float32, width: Widths | None = None) -> Tree:
        """Rows `index` (any shape) as model inputs, a tree like x; integers without a scale (token ids) stay integers.
        `Ragged` entries are padded to the longest of these rows, or to their `width` by name, and are followed by
        their masks and lengths."""
        x = batch_of(self.x, index, width, "x")
        x = in_dtype(x, dtype) if self.scale is None else x.to(dtype).mul_(self.scale.to(dtype))
        return x if self.shift is None else x.add_(self.shift.to(dtype))

    def targets(self, index: Tensor, dtype: torch.dtype = torch.float32, width: Widths | None = None) -> Tree:
        """Targets of rows `index`; real-valued ones and bytes (many labels, 0 or 1) in the model's dtype."""

        def target(y: Tensor) -> Tensor:
            return y.to(dtype) if y.is_floating_point() or y.dtype == torch.uint8 else y

        return tree_map(target, batch_of(self.y, index, width, "y"))

    def normalised_as(self, *others: Dataset | None) -> Dataset:
        """These examples with the scale and shift of the first of `others` that has them: the inputs that they are to a
        model trained on it. Numbers without scale and shift are model inputs already, and stay as they are."""
        known = [data for data in others if data is not None]
        other = next((data for data in known if data._scaled), known[-1])
        raw = isinstance(self.x, Tensor | Rows) and self.x.dtype == torch.uint8 and other._scaled
        if not self._scaled and not raw:
            return self
        if not other._scaled:
            raise DataError(
                f"{self.name} has a scale and shift of its own, and those of {other.name} are not known, because it "
                "holds model inputs: pass model inputs here too, without scale and shift"
            )
        if self.x.dtype != other.x.dtype or self.x.shape[1:] != other.x.shape[1:]:
            raise DataError(
                f"{self.name} cannot have the scale and shift of {other.name}: its examples are {form(self.x)}, and "
                f"those are {form(other.x)}. Convert them, or pass model inputs without scale and shift"
            )
        scale, shift = (None if part is None else part.to(self.device) for part in (other.scale, other.shift))
        return replace(self, scale=scale, shift=shift)

    @property
    def _scaled(self) -> bool:
        return self.scale is not None or self.shift is not None

    @property
    def by_index(self) -> bool:
        """Whether some entries are `Rows`, which are read by index."""
        return by_index(self.x) or by_index(self.y)

    def batches(self, indices: Iterable[Tensor]) -> Iterator[tuple[Dataset, Tensor]]:
        """For each of several indices of rows, a data set in memory and the places of these rows in it: this one, or,
        if it is read by index, one of these rows alone, which a thread has read ahead."""
        if not self.by_index:
            yield from ((self, index) for index in indices)
            return
        on_host = (index.cpu() for index in indices)
        for shape, held in read_ahead(lambda index: (index.shape, self._read(index.reshape(-1))), on_host, self.device):
            if self.device.type == "cuda":  # memory of another stream, which must not be used again too early
                for tensor in (*tensors(held.x), *tensors(held.y)):
                    tensor.record_stream(torch.cuda.current_stream(self.device))
            yield held, torch.arange(len(held), device=self.device).view(shape)

    def _read(self, index: Tensor) -> Dataset:
        """The rows `index` [n], in memory, where they are not checked again."""
        at = index.to(self.device, non_blocking=True)
        held = copy.copy(self)
        for name in ("x", "y"):
            tree = getattr(self, name)
            tree = map_entries(lambda part: part.take(index) if isinstance(part, Rows) else part[at], tree)
            object.__setattr__(held, name, tree)
        object.__setattr__(held, "groups", {})
        return held

    def to(self, device: torch.device | str) -> Dataset:
        """The same data set with its tensors on `device`. Rows by index stay where they are and are delivered there."""
        return replace(
            self._mapped(lambda column: column.to(device)),
            scale=None if self.scale is None else self.scale.to(device),
            shift=None if self.shift is None else self.shift.to(device),
        )

    def _mapped(self, fn: Callable[[Any], Any]) -> Dataset:
        """The same data set with `fn` applied to x, y and all groups."""
        groups = {name: fn(column) for name, column in self.groups.items()}
        return replace(self, x=map_entries(fn, self.x), y=map_entries(fn, self.y), groups=groups)


def _labels(y: Entry) -> Entry:
    """Labels of any integer type, or bool, in int64: one for each example, or for each place of a row."""
    if isinstance(y, Rows) and y.dim() == 1:
        y = y.take(torch.arange(len(y)))  # partitions and checks need all of them
    one = y.dim() == (2 if isinstance(y, Ragged) else 1)
    return y.long() if one and not y.is_floating_point() else y  # type: ignore[union-attr]


@dataclass(frozen=True, eq=False)
class Data:
    """A training and a test set, and examples that calibrate prediction sets."""

    train: Dataset
    test: Dataset
    calibration: Dataset | None = None

    def signed(self) -> Data:
        """Images of bytes scaled to −1 (black) … 1 (the brightest training pixel), as a DCGAN generates them; other
        data unchanged."""
        return self if self.train.scale is None or not self._has_images else self.scaled(-1.0, 1.0)

    def scaled(self, low: float = 0.0, high: float = 1.0) -> Data:
        """Images of bytes scaled to `low` (black) … `high` (the brightest training pixel) instead of standardised; by
        default to [0, 1], as torchvision's `ToTensor` does."""
        if not self._has_images:
            raise DataError(f"{self.train.name}: only images of bytes can be scaled; its x is {form(self.train.x)}")
        x = self.train.x
        if isinstance(x, Rows):
            raise DataError(
                f"{self.train.name}: the brightest pixel of images that are read by index is not known: give scale and "
                "shift yourself, such as scale = 1 / 255"
            )
        shape = (x.shape[1], 1, 1)
        scale = torch.full(shape, (high - low) / max(1, int(x.max())), device=x.device)
        shift = torch.full_like(scale, low)
        train, test = (replace(part, scale=scale, shift=shift) for part in (self.train, self.test))
        held_out = None if self.calibration is None else replace(self.calibration, scale=scale, shift=shift)
        return Data(train, test, held_out)

    @property
    def _has_images(self) -> bool:
        x = self.train.x
        return isinstance(x, Tensor | Rows) and x.dtype == torch.uint8 and x.dim() == 4 and len(x) > 0
