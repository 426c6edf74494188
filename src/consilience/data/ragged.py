"""Ragged: rows of different lengths, padded within a batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from consilience.core.errors import DataError
from consilience.data.tensors import starts, to_tensor


class Ragged:
    """N rows of different lengths, [L_i, ...], such as sentences of token ids: an entry of `Dataset.x`, or its `y`.

    A batch is padded with `padding` to its longest row, [B, L, ...]. `mask` names a further input, the mask [B, L]: 1
    where there is a value, 0 where there is padding, as in Hugging Face. `lengths` names the lengths [B]. In a dict
    these are further keys. In a tuple, or if the rows are the only input, they follow the padded tensor by position,
    the mask first.

    The rows are lists, arrays or tensors. They are stored one after another in `values` [ΣL, ...]; row i is
    `values[offsets[i]:offsets[i + 1]]`. `len(rows)` is N, `rows[i]` one row, `rows[index]` a Ragged.
    """

    values: Tensor
    offsets: Tensor
    mask: str | None
    lengths: str | None
    padding: float
    width: int
    """The length of the longest row; at least 1, so that a batch of empty rows has a place to pad."""

    def __init__(
        self,
        rows: Iterable[Any],
        *,
        mask: str | None = None,
        lengths: str | None = None,
        padding: float = 0,
    ) -> None:
        values, sizes = _joined(list(rows))
        self._fill(values, torch.tensor([0, *np.cumsum(sizes).tolist()]), mask, lengths, padding)

    @classmethod
    def from_values(
        cls, values: Any, offsets: Any, *, mask: str | None = None, lengths: str | None = None, padding: float = 0
    ) -> Ragged:
        """From rows that lie one after another in `values` [ΣL, ...]; row i begins at `offsets[i]`, and the last of
        the N + 1 offsets is the number of values."""
        found = cls.__new__(cls)
        values, offsets = to_tensor(values, "Ragged: values"), to_tensor(offsets, "Ragged: offsets")
        if offsets.dim() != 1 or offsets.is_floating_point() or not len(offsets):
            raise DataError("Ragged: offsets must be whole numbers [N + 1]: the beginning of every row, and the end")
        if not values.dim() or int(offsets[0]) != 0 or int(offsets[-1]) != len(values):
            ends = f"{int(offsets[0])} to {int(offsets[-1])}"
            raise DataError(f"Ragged: offsets go from {ends}, but must go from 0 to the number of values, {_n(values)}")
        if bool((offsets.diff() < 0).any()):
            raise DataError("Ragged: offsets must not decrease: row i is values[offsets[i]:offsets[i + 1]]")
        found._fill(values, offsets.long().to(values.device), mask, lengths, padding)
        return found

    @classmethod
    def cat(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of several Ragged, with the settings of the first."""
        sizes = torch.cat([part.sizes for part in parts])
        return parts[0]._with(torch.cat([part.values for part in parts]), starts(sizes))

    def _fill(self, values: Tensor, offsets: Tensor, mask: str | None, lengths: str | None, padding: float) -> None:
        for what, name in (("mask", mask), ("lengths", lengths)):
            if not (name is None or (isinstance(name, str) and name)):
                raise DataError(f"Ragged: {what} is the name of a further input, such as {what!r}, got {name!r}")
        if mask is not None and mask == lengths:
            raise DataError(f"Ragged: mask and lengths have the same name, {mask!r}")
        if not _fits(padding, values.dtype):
            kind = str(values.dtype).removeprefix("torch.")
            raise DataError(f"Ragged: padding must be a value of {kind}, as the rows are, got {padding!r}")
        self.values, self.offsets, self.mask, self.lengths = values, offsets, mask, lengths
        self.padding = padding if values.is_floating_point() else int(padding)
        self.width = max(1, int(self.sizes.max())) if len(self) else 1

    def _with(self, values: Tensor, offsets: Tensor) -> Ragged:
        new = type(self).__new__(type(self))
        new._fill(values, offsets, self.mask, self.lengths, self.padding)
        return new

    @property
    def sizes(self) -> Tensor:
        """The length of every row, [N]."""
        return self.offsets.diff()

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def shape(self) -> torch.Size:
        """The shape of all rows after padding, [N, L, ...]."""
        return torch.Size([len(self), self.width, *self.values.shape[1:]])

    def dim(self) -> int:
        """The number of axes after padding."""
        return self.values.dim() + 1

    def is_floating_point(self) -> bool:
        """True if the values are real numbers."""
        return self.values.is_floating_point()

    def long(self) -> Ragged:
        """The same rows in int64."""
        return self._with(self.values.long(), self.offsets)

    def to(self, device: torch.device | str) -> Ragged:
        """The same rows on `device`."""
        return self._with(self.values.to(device), self.offsets.to(device))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice | Tensor | Sequence[int]) -> Ragged: ...

    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> Tensor | Ragged:
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"there are {len(self)} rows, and no row {index}")
            row = index % len(self)
            return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]
        chosen = torch.arange(len(self), device=self.device)[index]
        sizes = self.sizes[chosen]
        offsets = starts(sizes)
        place = torch.arange(int(offsets[-1]), device=self.device)
        return self._with(self.values[place + (self.offsets[chosen] - offsets[:-1]).repeat_interleave(sizes)], offsets)

    def __repr__(self) -> str:
        return f"Ragged({len(self):,} rows, {self.form}, at most {self.width:,} long)"

    @property
    def form(self) -> str:
        """The shape of one row, its type and the settings, without the lengths: L × 3 float32 with mask m."""
        each = " × ".join(["L", *map(str, self.values.shape[1:])])
        more = [f"{what} {name}" for what, name in (("mask", self.mask), ("lengths", self.lengths)) if name]
        more += [f"padding {self.padding:g}"] if self.padding else []
        kind = str(self.dtype).removeprefix("torch.")
        return f"{each} {kind}" + (f" with {' and '.join(more)}" if more else "")

    def padded(self, index: Tensor, width: int | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """(rows `index`, of any shape, as [*index.shape, L, ...]; the mask and the lengths by name). L is the length of
        the longest of these rows, or `width`, to which longer rows are cut."""
        start, size = self.offsets[index], self.offsets[index + 1] - self.offsets[index]
        if width is None:
            width = max(1, int(size.max())) if index.numel() else 1
        place = torch.arange(width, device=self.device)
        real, each = place < size.unsqueeze(-1), self.values.shape[1:]
        if len(self.values):
            where = torch.where(real, start.unsqueeze(-1) + place, 0)
            rows = self.values.index_select(0, where.view(-1)).view(*where.shape, *each)
            rows = rows.masked_fill(~real.view(*real.shape, *[1] * len(each)), self.padding)
        else:
            rows = self.values.new_full((*real.shape, *each), self.padding)
        made = {} if self.mask is None else {self.mask: real.long()}
        return rows, made if self.lengths is None else {**made, self.lengths: size.clamp(max=width)}


def _joined(rows: list[Any]) -> tuple[Tensor, list[int]]:
    """(all values one after another, the lengths)."""
    if not rows:
        raise DataError("Ragged needs at least one row, got none")
    try:
        arrays = [row if isinstance(row, Tensor) else np.asarray(row) for row in rows]
        sizes = [len(row) for row in arrays]
        full = [row for row in arrays if len(row)] or arrays[:1]  # the type of an empty list says nothing
        shapes = {tuple(row.shape[1:]) for row in full}
        if len(shapes) > 1:
            first, other = sorted(shapes, key=str)[:2]
            raise DataError(f"Ragged: rows may differ in length only, but values have shapes {first} and {other}")
        if all(isinstance(row, Tensor) for row in full):
            return torch.cat([torch.as_tensor(row) for row in full]), sizes
        return to_tensor(np.concatenate([np.asarray(row) for row in full]), "Ragged: rows"), sizes
    except (TypeError, ValueError) as error:
        raise DataError(f"Ragged: every row must be a list, an array or a tensor of numbers ({error})") from error


def _fits(padding: Any, dtype: torch.dtype) -> bool:
    if not isinstance(padding, int | float) or math.isnan(padding):
        return False
    if dtype.is_floating_point:
        return True
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return low <= padding <= high and padding == int(padding)


def _n(values: Tensor) -> int:
    return len(values) if values.dim() else 0
