"""Rows that are read by index: of an array, of a file, or of an object that is asked for them."""

import copy
import mmap
import os
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from consilience.core.errors import DataError, nearest
from consilience.data.columns import column_input
from consilience.data.ragged import Ragged
from consilience.data.tensors import to_tensor


class Stored(ABC):
    """N rows of one shape and type."""

    count: int
    shape: tuple[int, ...]
    """The shape of one row."""
    dtype: torch.dtype

    @abstractmethod
    def read(self, index: Tensor) -> Tensor:
        """A fresh tensor of the rows `index` [n]."""


class Held(Stored):
    """Rows of an array or a tensor, whose memory may be a map."""

    def __init__(self, array: np.ndarray | Tensor, what: str) -> None:
        self.rows = array if isinstance(array, Tensor) else _viewed(array, what)
        if not self.rows.dim():
            raise DataError(f"{what} must have a row for each example")
        self.count, self.shape, self.dtype = len(self.rows), tuple(self.rows.shape[1:]), self.rows.dtype

    def read(self, index: Tensor) -> Tensor:
        return self.rows.index_select(0, index)


class InFile(Stored):
    """The rows of an array that is a map of a file, read from the file. To read rows through a map that are far apart,
    the kernel maps many pages around each, which takes several times as long and counts as memory of this process."""

    _first: "InFile | None" = None

    def __init__(self, held: Held, path: str | Path, position: int) -> None:
        self._path, self._file = str(path), os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self.count, self.shape, self.dtype = held.count, held.shape, held.dtype
        self._step, self._size = held.rows.stride(0) * held.rows.itemsize, held.rows[:1].nbytes
        self._starts, self._positions = torch.tensor([0]), torch.tensor([position])

    @classmethod
    def joined(cls, parts: Sequence[Stored]) -> Stored | None:
        """The rows of several parts of one file, if they are such."""
        files = [part for part in parts if isinstance(part, InFile)]
        if len(files) < len(parts) or len({(part._path, part._step, part._size) for part in files}) > 1:
            return None
        new = copy.copy(files[0])
        new._first = files[0]  # which closes the file
        before = torch.tensor([0, *(part.count for part in files)]).cumsum(0)
        new._starts = torch.cat([part._starts + start for part, start in zip(files, before, strict=False)])
        new._positions = torch.cat([part._positions for part in files])
        new.count = int(before[-1])
        return new

    @classmethod
    def of(cls, held: Held, path: str | Path, position: int) -> Stored:
        """`held`, whose first byte is at `position` of a file, as rows in this file; as they are if it cannot be
        opened, or holds other numbers, because it was replaced."""
        if not held.count or not held.rows[0].is_contiguous() or held.rows.stride(0) < 0:
            return held
        some = torch.arange(0, held.count, -(-held.count // 8))
        try:
            found = cls(held, path, position)
            alike = torch.equal(found.read(some).view(torch.uint8), held.read(some).view(torch.uint8))
        except (OSError, DataError):
            return held
        return found if alike else held

    def read(self, index: Tensor) -> Tensor:
        found = torch.empty(len(index), *self.shape, dtype=self.dtype)
        into = memoryview(found.numpy().reshape(-1).view(np.uint8).data)
        part = torch.searchsorted(self._starts, index, right=True) - 1
        place = self._positions[part] + (index - self._starts[part]) * self._step
        if not len(index):
            return found
        breaks = [0, *((place.diff() != self._size).nonzero().flatten() + 1).tolist()]
        for low, high, position in zip(breaks, [*breaks[1:], len(index)], place[breaks].tolist(), strict=True):
            self._fill(into[low * self._size : high * self._size], position)
        return found

    def _fill(self, into: memoryview, position: int) -> None:
        while len(into):
            done = os.preadv(self._file, [into], position)
            if not done:
                raise DataError(f"{self._path} is shorter than when it was opened")
            into, position = into[done:], position + done


class Asked(Stored):
    """Rows of an object with a length that returns several rows for a list of indices, such as a Hugging Face data
    set: of `column` if it returns columns by name. Numbers of several columns are joined to a vector. Images become
    bytes."""

    def __init__(self, source: Any, column: str | Sequence[str] | None) -> None:
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise DataError(f"a {type(source).__name__} has no rows by index: it needs a length and source[[0, 5]]")
        names = [column] if isinstance(column, str) else list(column or ())
        if names and hasattr(source, "select_columns"):  # of Hugging Face: other columns need not be decoded
            check_columns(names, source.column_names)
            source = source.select_columns(names)
        self._source, self._column = source, column
        self._what = f"rows of a {type(source).__name__}"
        self.count = len(source)
        if not self.count:
            raise DataError(f"{self._what}: there are none")
        first = self._cells([0])
        self.images = isinstance(first, list) and isinstance(first[0], Image)
        row = self._tensor(first)
        self.shape, self.dtype = tuple(row.shape[1:]), row.dtype

    def read(self, index: Tensor) -> Tensor:
        if not len(index):
            return torch.empty(0, *self.shape, dtype=self.dtype)
        wanted, place = torch.unique(index, return_inverse=True)  # some sources take indices in increasing order only
        found = self._tensor(self._cells(wanted.tolist()))
        if (len(found), found.shape[1:], found.dtype) != (len(wanted), self.shape, self.dtype):
            raise DataError(
                f"{self._what}: rows must have one shape and type, and the first has {list(self.shape)} {self.dtype}, "
                f"but {len(wanted)} of them have {list(found.shape)} {found.dtype}: crop, pad or convert them first"
            )
        return found[place]

    def _cells(self, index: list[int]) -> Any:
        try:
            rows = self._source[index]
            if self._column is None:
                return rows
            return rows[self._column] if isinstance(self._column, str) else [rows[name] for name in self._column]
        except (TypeError, KeyError, IndexError, ValueError) as error:
            raise DataError(
                f"{self._what} {index[:3]} cannot be read ({type(error).__name__}: {error}): source[[0, 5]] must "
                "return two rows, or their columns by name"
            ) from error

    def _tensor(self, cells: Any) -> Tensor:
        if self._column is not None and not isinstance(self._column, str):
            return torch.from_numpy(np.stack([np.asarray(column, np.float64) for column in cells], 1))
        values, _ = column_input(cells)
        if isinstance(values, Ragged):
            raise DataError(
                f"{self._what} differ in length: rows by index have one shape; hold them in a Ragged, in memory, or "
                "pad them"
            )
        return to_tensor(values, self._what)


class Joined(Stored):
    """One number of each of several columns, as a vector in float64."""

    def __init__(self, columns: Sequence[Sequence[Stored]]) -> None:
        self._columns = [Chunks(column) for column in columns]
        self.count, self.shape, self.dtype = self._columns[0].count, (len(columns),), torch.float64
        if any(column.shape for column in self._columns):
            raise DataError("several columns are joined to a vector, and need one number in each row: name one column")

    def read(self, index: Tensor) -> Tensor:
        return torch.stack([column.read(index).double() for column in self._columns], 1)


class Chosen(Stored):
    """Some of the rows of another source."""

    def __init__(self, stored: Stored, chosen: Tensor) -> None:
        self._stored, self._chosen = stored, chosen
        self.count, self.shape, self.dtype = len(chosen), stored.shape, stored.dtype

    def read(self, index: Tensor) -> Tensor:
        return self._stored.read(self._chosen[index])


class Multiplied(Stored):
    """Rows times a factor, as real numbers."""

    def __init__(self, stored: Stored, factor: float) -> None:
        self._stored, self._factor = stored, factor
        self.count, self.shape = stored.count, stored.shape
        self.dtype = (torch.empty(0, dtype=stored.dtype) * factor).dtype

    def read(self, index: Tensor) -> Tensor:
        return self._stored.read(index) * self._factor


class Chunks(Stored):
    """The rows of several parts, one after another."""

    def __init__(self, parts: Sequence[Stored]) -> None:
        forms = {(part.shape, part.dtype) for part in parts}
        if len(forms) != 1:
            found = " and ".join(sorted(f"{list(shape)} {dtype}" for shape, dtype in forms)) or "none"
            raise DataError(f"the parts of rows by index must have one shape and type, found {found}")
        self.parts: list[Stored] = [
            own for part in parts for own in (part.parts if isinstance(part, Chunks) else [part])
        ]
        if len(self.parts) > 1 and (whole := InFile.joined(self.parts)) is not None:
            self.parts = [whole]
        self._starts = torch.tensor([0] + [part.count for part in self.parts]).cumsum(0)
        ((self.shape, self.dtype),) = forms
        self.count = int(self._starts[-1])

    def read(self, index: Tensor) -> Tensor:
        if len(self.parts) == 1:
            return self.parts[0].read(index)
        order = index.argsort()
        bounds = torch.searchsorted(index[order], self._starts).tolist()
        found = torch.empty(len(index), *self.shape, dtype=self.dtype)
        for part, start, low, high in zip(self.parts, self._starts.tolist(), bounds, bounds[1:], strict=False):
            if low < high:
                found[order[low:high]] = part.read(index[order[low:high]] - start)
        return found


def file_map(value: Any) -> tuple[bool, tuple[str, int] | None]:
    """(whether an array's memory is a map, the file and the place in it of the array's first byte). A private map has
    no file: it may hold what was written to it alone."""
    place, base = None, value if isinstance(value, np.ndarray) else None
    while base is not None:
        if isinstance(base, np.memmap) and getattr(base, "_mmap", None) is not None:
            place = None if base.mode == "c" or base.filename is None else (str(base.filename), base.offset)
        if isinstance(base, mmap.mmap):
            if place is None:
                return True, None
            first = place[1] - place[1] % mmap.ALLOCATIONGRANULARITY
            return True, (place[0], first + value.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data)
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return False, None


def array_rows(array: np.ndarray, what: str, place: tuple[str | Path, int] | None) -> Stored:
    """The rows of an array, read from the file if its first byte is at a `place` of one."""
    held = Held(array, what)
    return held if place is None else InFile.of(held, *place)


def _viewed(array: np.ndarray, what: str) -> Tensor:
    """A tensor on the memory of an array, which nobody writes to."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of arrays that may not be written to
            return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{what} of type {array.dtype} cannot be read by index ({str(error).split('. ')[0]}): store numbers of "
            "this machine's byte order, with rows in increasing order"
        ) from error


def check_columns(names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse names of columns that there are not."""
    for name in names:
        if name not in known:
            raise DataError(f"there is no column {name!r}; {nearest(name, known)}")
