"""Rows that are not in memory: of a memory map, of an Arrow file, or of an object that is asked for them."""

import mmap
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from consilience.core.errors import DataError, nearest
from consilience.data.columns import column_input
from consilience.data.ragged import Ragged
from consilience.data.tensors import to_tensor

MAPPED = (
    2**28
)  # bytes of a file that stay mapped, at most: the kernel maps up to AROUND bytes for each row that is read
AROUND = 2**20


class Stored(ABC):
    """N rows of one shape and type."""

    count: int
    shape: tuple[int, ...]
    """The shape of one row."""
    dtype: torch.dtype

    @abstractmethod
    def read(self, index: Tensor) -> Tensor:
        """A fresh tensor of the rows `index` [n]."""


class Mapped(Stored):
    """Rows of an array, whose memory is usually a file. With its `map`, pages that were read are released now and then:
    they stay in the kernel's cache, but no longer count as memory of this process. The kernel is told that rows are
    read at random, and which pages will be needed where they lie close together."""

    def __init__(self, array: np.ndarray | Tensor, what: str, map: mmap.mmap | None = None) -> None:
        self._rows = array if isinstance(array, Tensor) else _viewed(array, what)
        if not self._rows.dim():
            raise DataError(f"{what} must have a row for each example")
        self.count, self.shape, self.dtype = len(self._rows), tuple(self._rows.shape[1:]), self._rows.dtype
        self._map, self._read = map, 0
        if map is not None:
            map.madvise(mmap.MADV_RANDOM)
            self._offset = self._rows.data_ptr() - np.frombuffer(map, np.uint8).ctypes.data

    def read(self, index: Tensor) -> Tensor:
        if self._map is None or not len(index):
            return self._rows.index_select(0, index)
        low, high, step = int(index.min()), int(index.max()) + 1, self._rows.stride(0) * self._rows.itemsize
        if high - low < 4 * len(index) and step > 0:
            start = self._offset + low * step
            start -= start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, start, min(len(self._map), self._offset + high * step) - start)
        found = self._rows.index_select(0, index)
        self._read += len(index) * (AROUND + self._rows[:1].nbytes)
        if self._read > MAPPED:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._read = 0
        return found


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


def file_map(value: Any) -> tuple[bool, mmap.mmap | None]:
    """(whether an array's memory is a map, the map if its pages may be released). A private map is not released: it
    would lose what was written to it."""
    shared, base = False, value if isinstance(value, np.ndarray) else None
    while base is not None:
        if isinstance(base, np.memmap) and getattr(base, "_mmap", None) is not None:
            shared = base.mode != "c"
        if isinstance(base, mmap.mmap):
            return True, base if shared and hasattr(base, "madvise") else None
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return False, None


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
