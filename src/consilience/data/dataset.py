"""Dataset: tensors that lie on the device, with what is needed to turn stored rows into model inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core.display import clip, facts
from consilience.core.errors import DataError
from consilience.core.text import plural


def rows_at(table: Tensor, index: Tensor) -> Tensor:
    """A fresh copy of `table[index]` for an index of any shape; ten times faster than indexing for rows of bytes."""
    return table.index_select(0, index.reshape(-1)).view(*index.shape, *table.shape[1:])


def tensor(value: Any, what: str) -> Tensor:
    """`value`, a tensor or an array, table or list of numbers, as a tensor; it shares memory where it can."""
    if isinstance(value, Tensor):
        return value
    if not (hasattr(value, "__array__") or isinstance(value, Sequence | int | float)):
        raise DataError(
            f"{what} must be a tensor, an array, a table or a list of numbers, not a {type(value).__name__}: "
            "torch.stack([x for x, _ in examples]) makes one of a torch Dataset"
        )
    try:
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{what} must be numbers in rows of one length ({str(error).split('. ')[0]}): number names by "
            "numpy.unique(…, return_inverse=True), and make a table's columns of one type by .astype(float)"
        ) from error


def whole(value: Any, what: str) -> Tensor:
    """Ids of clients or groups, one for each example, as [N] int64."""
    ids = tensor(value, what)
    if ids.dim() != 1 or (ids.is_floating_point() and not bool((ids == ids.long()).all())):
        raise DataError(f"{what} must be whole numbers [N], one for each example")
    return ids.long()


def real(value: Any, what: str) -> Tensor:
    """The same as `tensor`, but float64 that was no tensor gets torch's default type."""
    found = tensor(value, what)
    if found is value or found.dtype != torch.float64:
        return found
    return found.to(torch.get_default_dtype())


@dataclass(frozen=True, eq=False)
class Dataset:
    """N examples. Images stay uint8 in memory (a quarter of the space) and become inputs batch by batch:
    `x.float() * scale + shift`, with scale and shift broadcast against one example.

    `y` is [N] int64 for classes, [N, D] float for regression, [N, L] float or uint8 in {0, 1} for multi-label.
    `groups` holds further columns [N] int64 (writer, hospital, coarse label) with their names, if any.

    Arrays of numpy, tables of pandas and lists of numbers become tensors. Those of float64 get torch's default type,
    float32 unless you change it; a tensor of float64 stays one. Labels [N] of any integers, or of False and True,
    become int64. Inputs of integers are bytes or token ids: make features real numbers, by `.astype(float)`.
    """

    x: Tensor
    y: Tensor
    classes: tuple[str, ...] = ()
    groups: Mapping[str, Tensor] = field(default_factory=dict)
    group_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scale: Tensor | None = None
    shift: Tensor | None = None
    name: str = "data"
    note: str = ""

    def __post_init__(self) -> None:
        scales = {what: value for what, value in (("scale", self.scale), ("shift", self.shift)) if value is not None}
        given = {"x": self.x, "y": self.y, **scales}
        found = {what: real(value, f"{self.name}: {what}") for what, value in given.items()}
        if found["y"].dim() == 1 and not found["y"].is_floating_point():
            found["y"] = found["y"].long()
        groups = {name: whole(column, f"{self.name}: group {name!r}") for name, column in self.groups.items()}
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

    def subset(self, index: Tensor) -> Dataset:
        """The rows `index` as a data set of their own."""
        groups = {name: column[index] for name, column in self.groups.items()}
        return replace(self, x=self.x[index], y=self.y[index], groups=groups)

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
    """What a loader returns: a training and a test set."""

    train: Dataset
    test: Dataset

    def signed(self) -> Data:
        """Images of bytes from −1, black, to 1, the brightest pixel to learn from, as a DCGAN makes them; other data as
        they are."""
        train, test = self.train, self.test
        if train.scale is None or train.x.dtype != torch.uint8 or train.x.dim() != 4 or not len(train):
            return self
        scale = torch.full_like(train.scale, 2 / max(1, int(train.x.max())))
        shift = torch.full_like(scale, -1.0)
        return Data(replace(train, scale=scale, shift=shift), replace(test, scale=scale, shift=shift))
