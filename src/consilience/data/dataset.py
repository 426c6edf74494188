"""Dataset: tensors that lie on the device, with what is needed to turn stored rows into model inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from consilience.display import clip, facts
from consilience.errors import DataError
from consilience.report.text import plural


def rows_at(table: Tensor, index: Tensor) -> Tensor:
    """A fresh copy of `table[index]` for an index of any shape; ten times faster than indexing for rows of bytes."""
    return table.index_select(0, index.reshape(-1)).view(*index.shape, *table.shape[1:])


@dataclass(frozen=True, eq=False)
class Dataset:
    """N examples. Images stay uint8 in memory (a quarter of the space) and become inputs batch by batch:
    `x.float() * scale + shift`, with scale and shift broadcast against one example.

    `y` is [N] int64 for classes, [N, D] float for regression, [N, L] float or uint8 in {0, 1} for multi-label.
    `groups` holds further columns [N] int64 (writer, hospital, coarse label) with their names, if any.
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
        for what, rows in {"y": self.y, **self.groups}.items():
            if len(rows) != len(self.x):
                raise DataError(f"{self.name}: x has {len(self.x)} rows but {what} has {len(rows)}")
        if self.x.is_floating_point() and not bool(torch.isfinite(self.x).all()):
            raise DataError(f"{self.name}: x holds values that are not finite; fill or drop them first")

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        parts = [plural(len(self), "example"), f"x {_form(self.x)}", f"y {_form(self.y)}"]
        parts += [f"{len(self.classes):,} classes"] if self.classes else []
        return f"Dataset({clip(self.name, 60)}: {', '.join(parts)})"

    def _repr_html_(self) -> str:
        few = ", ".join(self.classes[:12]) + (", …" if len(self.classes) > 12 else "")
        return facts(
            f"Dataset {self.name}",
            [
                ("examples", f"{len(self):,}"),
                ("inputs", _form(self.x)),
                ("targets", _form(self.y)),
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


def _form(column: Tensor) -> str:
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
