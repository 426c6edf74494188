"""Dataset: the examples as tensors, and the constants that turn stored rows into model inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from consilience.core.display import clip, facts
from consilience.core.errors import DataError
from consilience.core.text import plural
from consilience.data.sources import read_source, to_ids, to_tensor

Source = Any
"""A Dataset, or anything that `Dataset.of` reads."""


def rows_at(table: Tensor, index: Tensor) -> Tensor:
    """A fresh copy of `table[index]` for an index of any shape; ten times faster than indexing for rows of bytes."""
    return table.index_select(0, index.reshape(-1)).view(*index.shape, *table.shape[1:])


@dataclass(frozen=True, eq=False)
class Dataset:
    """N examples. Images are stored as uint8 and become inputs batch by batch: `x.float() * scale + shift`, with scale
    and shift broadcast against one example.

    `y` is [N] int64 for classes, [N, D] float for regression, [N, L] float or uint8 in {0, 1} for multi-label.
    `groups` holds further columns [N] int64 (writer, hospital, coarse label) with their names, if any.

    Arrays, tables and lists of numbers become tensors, those of float64 in torch's default type; a tensor keeps its
    type. Labels [N] of any integer type, or bool, become int64. Inputs of integers are bytes or token ids: convert
    features by `.astype(float)`. `Dataset.of` reads other sources.

    `len(data)` is N; `data[i]` is the pair of a model input and a target; `data[index]`, with a slice, a tensor of
    indices or a mask, is a Dataset of these rows.
    """

    x: Tensor
    y: Tensor
    _: KW_ONLY
    classes: tuple[str, ...] = ()
    groups: Mapping[str, Tensor] = field(default_factory=dict)
    group_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scale: Tensor | None = None
    shift: Tensor | None = None
    name: str = "data"
    note: str = ""

    @classmethod
    def of(
        cls,
        source: Any,
        *,
        target: str | None = None,
        inputs: str | Sequence[str] | None = None,
        groups: Sequence[str] = (),
        name: str | None = None,
    ) -> Dataset:
        """A Dataset from a pair (x, y), a torch Dataset, a DataLoader (its data set, not its batches), a DataFrame or a
        Hugging Face data set.

        Of a source with columns, `target` is the column to predict, `groups` are columns of ids or names, such as
        hospital, and `inputs` are the columns of features, by default all others. Names of classes are numbered in
        their sorted order. Images become inputs from 0 to 1.
        """
        if isinstance(source, DataLoader):
            source = source.dataset
        if isinstance(source, Dataset):
            return source if name is None else replace(source, name=name)
        if isinstance(source, Data):
            raise DataError("a Data has two data sets: pass its .train or its .test")
        found = read_source(source, target, inputs, groups)
        columns = {column.name: getattr(found, column.name) for column in fields(found)}
        return cls(**columns, name=name or "data")

    def __post_init__(self) -> None:
        scales = {what: value for what, value in (("scale", self.scale), ("shift", self.shift)) if value is not None}
        given = {"x": self.x, "y": self.y, **scales}
        found = {what: to_tensor(value, f"{self.name}: {what}") for what, value in given.items()}
        if found["y"].dim() == 1 and not found["y"].is_floating_point():
            found["y"] = found["y"].long()
        groups = {name: to_ids(column, f"{self.name}: group {name!r}") for name, column in self.groups.items()}
        for name, value in {**found, "groups": groups, "classes": tuple(map(str, self.classes))}.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        if not (self.x.dim() and self.y.dim()):
            raise DataError(f"{self.name}: x and y must have a row for each example")
        for what, rows in {"y": self.y, **self.groups}.items():
            if len(rows) != len(self.x):
                raise DataError(f"{self.name}: x has {len(self.x)} rows but {what} has {len(rows)}")
        for what, rows in (("x", self.x), ("y", self.y)):
            if rows.is_floating_point() and not bool(torch.isfinite(rows).all()):
                raise DataError(f"{self.name}: {what} holds values that are not finite; fill or drop them first")
        if self.classes and self.y.dim() == 1 and not self.y.is_floating_point() and len(self):
            low, high, count = int(self.y.min()), int(self.y.max()), len(self.classes)
            if not 0 <= low <= high < count:
                raise DataError(
                    f"{self.name}: labels lie in {low}..{high}, but classes has {plural(count, 'name')} "
                    f"(labels 0..{count - 1} are allowed)"
                )

    def __len__(self) -> int:
        return len(self.x)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...

    @overload
    def __getitem__(self, index: slice | Tensor | Sequence[int]) -> Dataset: ...

    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> Dataset | tuple[Tensor, Tensor]:
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"{self.name} has {plural(len(self), 'example')}, and no index {index}")
            row = torch.tensor([index % len(self)], device=self.x.device)
            return self.inputs(row)[0], self.targets(row)[0]
        index = torch.arange(len(self), device=self.x.device)[index]  # a copy also of a slice, not a view of all rows
        groups = {name: column[index] for name, column in self.groups.items()}
        return replace(self, x=self.x[index], y=self.y[index], groups=groups)

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

    def inputs(self, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows `index` (any shape) as model inputs; integers without a scale (token ids) stay integers."""
        x = rows_at(self.x, index)
        if self.scale is not None:
            x = x.to(dtype).mul_(self.scale.to(dtype))
        elif x.is_floating_point():
            x = x.to(dtype)
        return x if self.shift is None else x.add_(self.shift.to(dtype))

    def targets(self, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Targets of rows `index`; real-valued ones and bytes (many labels, 0 or 1) in the model's dtype."""
        y = rows_at(self.y, index)
        return y.to(dtype) if y.is_floating_point() or y.dtype == torch.uint8 else y

    def to(self, device: torch.device | str) -> Dataset:
        """The same data set with its tensors on `device`."""
        return replace(
            self,
            x=self.x.to(device),
            y=self.y.to(device),
            groups={name: column.to(device) for name, column in self.groups.items()},
            scale=None if self.scale is None else self.scale.to(device),
            shift=None if self.shift is None else self.shift.to(device),
        )


def form(column: Tensor) -> str:
    """The shape of one example and its type: 28 × 28 uint8."""
    each = " × ".join(str(n) for n in column.shape[1:])
    return f"{each} {column.dtype}".replace("torch.", "").strip()


@dataclass(frozen=True, eq=False)
class Data:
    """A training and a test set."""

    train: Dataset
    test: Dataset

    def signed(self) -> Data:
        """Images of bytes scaled to −1 (black) … 1 (the brightest training pixel), as a DCGAN generates them; other
        data unchanged."""
        train, test = self.train, self.test
        if train.scale is None or train.x.dtype != torch.uint8 or train.x.dim() != 4 or not len(train):
            return self
        scale = torch.full_like(train.scale, 2 / max(1, int(train.x.max())))
        shift = torch.full_like(scale, -1.0)
        return Data(replace(train, scale=scale, shift=shift), replace(test, scale=scale, shift=shift))
