"""Rows: examples that are read by index when a batch needs them, instead of held in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from consilience.core.errors import DataError
from consilience.data.opening import stored_rows
from consilience.data.stored import Asked, Chosen, Chunks, Held, Multiplied, Stored

SAMPLED = 256  # rows that stand for all of them in a checksum


class Rows:
    """N rows that are read by index when a batch needs them: an entry of `Dataset.x`, or its `y`.

    `source` is a memory map of NumPy or the path of a .npy file; a pyarrow table or column, or the path of an
    uncompressed .arrow or .feather file; or any object with a length for which `source[[0, 5]]` returns two rows, such
    as a Hugging Face data set. Of a source with columns, `column` names one; several columns with one number in a row
    are joined to a vector. Images become bytes [C, H, W]. With a `factor`, such as 1/255, rows are multiplied by it.

    As in a tensor from an array, float64 becomes torch's default type. Every row that is read must be finite.
    `len(rows)` is N, `rows[i]` one row in memory, and `rows[index]`, with a slice, a tensor of indices or a mask, a
    choice of the rows that is not read yet.
    """

    device: torch.device
    """Where rows are delivered. They stay where they are."""

    def __init__(self, source: Any, column: str | Sequence[str] | None = None, *, factor: float | None = None) -> None:
        stored = stored_rows(source, column)
        self._fill(stored if factor is None else Multiplied(stored, factor))

    @classmethod
    def _of(cls, stored: Stored) -> Rows:
        found = cls.__new__(cls)
        found._fill(stored)
        return found

    def _fill(self, stored: Stored, chosen: Tensor | None = None, device: torch.device | str = "cpu") -> None:
        self._stored, self._chosen, self.device = stored, chosen, torch.device(device)
        self.dtype = torch.get_default_dtype() if stored.dtype == torch.float64 else stored.dtype

    def _with(self, chosen: Tensor | None, device: torch.device | str) -> Rows:
        new = type(self).__new__(type(self))
        new._fill(self._stored, chosen, device)
        return new

    @classmethod
    def cat(cls, parts: Sequence[Rows | Tensor]) -> Rows:
        """The rows of several parts, of which some may be in memory."""
        stored = [part._whole() if isinstance(part, Rows) else Held(part, "rows") for part in parts]
        return cls._of(Chunks(stored))

    def _whole(self) -> Stored:
        return self._stored if self._chosen is None else Chosen(self._stored, self._chosen)

    @property
    def images(self) -> bool:
        """Whether the rows are images, whose bytes need a scale."""
        return isinstance(self._stored, Asked) and self._stored.images

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self), *self._stored.shape])

    def dim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def is_floating_point(self) -> bool:
        """True if the values are real numbers."""
        return self.dtype.is_floating_point

    def to(self, device: torch.device | str) -> Rows:
        """The same rows, delivered on `device`."""
        return self._with(self._chosen, device)

    def __len__(self) -> int:
        return self._stored.count if self._chosen is None else len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice | Tensor | Sequence[int]) -> Rows: ...

    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> Tensor | Rows:
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"there are {len(self)} rows, and no row {index}")
            return self.take(torch.tensor([index % len(self)]))[0]
        index = index.cpu() if isinstance(index, Tensor) else index
        return self._with(self._places()[index].clone(), self.device)

    def _places(self) -> Tensor:
        return torch.arange(len(self)) if self._chosen is None else self._chosen

    def __repr__(self) -> str:
        each = " × ".join([f"{len(self):,} rows", *map(str, self.shape[1:])])
        return f"Rows({each} {self.dtype}, read by index)".replace("torch.", "")

    def take(self, index: Tensor) -> Tensor:
        """The rows `index` (any shape) as a fresh tensor on `device`."""
        flat = index.reshape(-1).cpu()
        flat = flat if self._chosen is None else self._chosen[flat]
        found = self._stored.read(flat)
        if found.is_floating_point() and not bool(torch.isfinite(found).all()):
            row = int(flat[(~torch.isfinite(found)).reshape(len(flat), -1).any(1).nonzero()[0]])
            raise DataError(f"row {row} of the data holds values that are not finite; fill or drop them first")
        found = found.to(self.dtype).view(*index.shape, *self.shape[1:])
        return found if self.device.type == "cpu" else found.pin_memory().to(self.device, non_blocking=True)

    def sampled(self) -> Tensor:
        """Rows at equal distances, in memory: those whose checksum stands for all."""
        some = np.linspace(0, max(0, len(self) - 1), min(SAMPLED, len(self))).astype(np.int64)
        return self.to("cpu").take(torch.from_numpy(some))

    def data_ptr(self) -> int:
        """An address that no other choice of rows shares."""
        return id(self._stored) if self._chosen is None else self._chosen.data_ptr()
