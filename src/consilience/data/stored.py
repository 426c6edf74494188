"""Rows that are not in memory: of a memory map, of an Arrow file, or of an object that is asked for them."""

import mmap
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL.Image import Image
from torch import Tensor

from consilience.core.errors import DataError, nearest
from consilience.data.columns import column_input
from consilience.data.ragged import Ragged
from consilience.data.tensors import to_tensor

MAPPED = 2**28  # bytes of a file that stay mapped: the kernel maps up to AROUND bytes for each row that is read
AROUND = 2**16


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
    they stay in the kernel's cache, but no longer count as memory of this process."""

    def __init__(self, array: np.ndarray | Tensor, what: str, map: mmap.mmap | None = None) -> None:
        self._rows = array if isinstance(array, Tensor) else _viewed(array, what)
        if not self._rows.dim():
            raise DataError(f"{what} must have a row for each example")
        self._map, self._read = map, 0
        self.count, self.shape, self.dtype = len(self._rows), tuple(self._rows.shape[1:]), self._rows.dtype

    def read(self, index: Tensor) -> Tensor:
        found = self._rows.index_select(0, index)
        self._read += len(index) * (AROUND + self._rows[:1].nbytes) if self._map is not None else 0
        if self._map is not None and self._read > MAPPED:
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
            _check_columns(names, source.column_names)
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
        wanted, place = index.unique(return_inverse=True)  # some sources take indices in increasing order only
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
        self.parts = [own for part in parts for own in (part.parts if isinstance(part, Chunks) else [part])]
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


def stored_rows(source: Any, column: str | Sequence[str] | None) -> Stored:
    """The rows of a memory map, an Arrow table or column, a file of either, or an object with rows by index."""
    if isinstance(source, str | Path):
        return _of_file(Path(source), column)
    if isinstance(source, pa.Table):
        return _of_table(source, column, None)
    if isinstance(source, np.ndarray | Tensor | pa.Array | pa.ChunkedArray) and column is not None:
        raise DataError(f"a {type(source).__name__} has no columns: leave column out")
    if isinstance(source, pa.Array | pa.ChunkedArray):
        return Chunks(_of_chunks(source, "an Arrow column", None))
    if isinstance(source, np.ndarray | Tensor):
        return Mapped(source, "rows", file_map(source)[1])
    return Asked(source, column)


def _of_file(path: Path, column: str | Sequence[str] | None) -> Stored:
    kind = path.suffix.lower()
    if kind == ".parquet":
        raise DataError(
            f"{path}: a Parquet file has no rows by index, because it is compressed in groups of rows: write it once "
            "as an Arrow file, batch by batch, as docs/large-data.md shows"
        )
    if kind not in (".npy", ".arrow", ".feather"):
        raise DataError(f"{path}: a .npy, .arrow or .feather file is expected; numpy.memmap opens a raw file")
    try:
        if kind == ".npy":
            return stored_rows(np.load(path, mmap_mode="r"), column)
        with path.open("rb") as file:
            held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _of_table(_arrow_table(held, path), column, held)
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _arrow_table(held: mmap.mmap, path: Path) -> pa.Table:
    """The table of an Arrow file or stream, whose buffers must lie in the map."""
    whole = pa.py_buffer(held)
    try:
        table = pa.ipc.open_file(pa.BufferReader(whole)).read_all()
    except pa.ArrowInvalid:
        table = pa.ipc.open_stream(pa.BufferReader(whole)).read_all()
    buffers = [buffer for column in table.columns for chunk in column.chunks for buffer in chunk.buffers()]
    if any(b is not None and b.size and not 0 <= b.address - whole.address < whole.size for b in buffers):
        raise DataError(
            f"{path} is compressed, so that its rows cannot be read by index: write it with compression='uncompressed'"
        )
    return table


def _of_table(table: pa.Table, column: str | Sequence[str] | None, held: mmap.mmap | None) -> Stored:
    if column is None:
        raise DataError(f"say which column to read, such as column={table.column_names[0]!r}, or a list of columns")
    names = [column] if isinstance(column, str) else list(column)
    _check_columns(names, table.column_names)
    parts = [_of_chunks(table[name], f"column {name!r}", held) for name in names]
    return Chunks(parts[0]) if isinstance(column, str) else Joined(parts)


def _check_columns(names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise DataError(f"there is no column {name!r}; {nearest(name, known)}")


def _of_chunks(column: pa.Array | pa.ChunkedArray, what: str, held: mmap.mmap | None) -> list[Stored]:
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    found: list[Stored] = [Mapped(_array(chunk, what), what, held) for chunk in chunks if len(chunk)]
    if not found:
        raise DataError(f"{what} has no rows")
    return found


def _array(chunk: Any, what: str) -> np.ndarray:
    """The memory of an Arrow array as a NumPy array of the same numbers."""
    if isinstance(chunk, pa.ExtensionArray):
        return _array(chunk.storage, what)
    if chunk.null_count:
        raise DataError(f"{what} has missing values: fill them in or drop the rows first")
    kind, count = chunk.type, len(chunk)
    if pa.types.is_fixed_size_binary(kind):
        values = np.frombuffer(chunk.buffers()[1], np.uint8)[chunk.offset * kind.byte_width :]
        return values[: count * kind.byte_width].reshape(count, kind.byte_width)
    if pa.types.is_fixed_size_list(kind):
        values = _array(chunk.flatten(), what)
        return values.reshape(count, kind.list_size, *values.shape[1:])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        sizes = np.unique(np.diff(chunk.offsets.to_numpy()))
        if len(sizes) > 1:
            raise DataError(
                f"{what} has lists of different lengths: rows by index have one shape; hold them in a Ragged, in "
                "memory, or pad them"
            )
        values = _array(chunk.flatten(), what)
        return values.reshape(count, int(sizes[0]), *values.shape[1:])
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise DataError(f"{what} holds values of Arrow's type {kind}: rows by index are numbers, or lists of numbers")
    return chunk.to_numpy(zero_copy_only=True)


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
