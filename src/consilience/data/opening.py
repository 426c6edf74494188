"""Rows by index from what users hold: memory maps, Arrow tables, files of either, objects with rows by index."""

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from consilience.core.errors import DataError
from consilience.data.stored import Asked, Chunks, Held, Joined, Stored, array_rows, check_columns, file_map


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
        return Held(source, "rows") if isinstance(source, Tensor) else array_rows(source, "rows", file_map(source)[1])
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
            whole = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return _of_table(_arrow_table(whole, path), column, (path, whole.address))
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _arrow_table(whole: pa.Buffer, path: Path) -> pa.Table:
    """The table of an Arrow file or stream, whose buffers must lie in the map of the `whole` file."""
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


def _of_table(table: pa.Table, column: str | Sequence[str] | None, file: tuple[Path, int] | None) -> Stored:
    if column is None:
        raise DataError(f"say which column to read, such as column={table.column_names[0]!r}, or a list of columns")
    names = [column] if isinstance(column, str) else list(column)
    check_columns(names, table.column_names)
    parts = [_of_chunks(table[name], f"column {name!r}", file) for name in names]
    return Chunks(parts[0]) if isinstance(column, str) else Joined(parts)


def _of_chunks(column: pa.Array | pa.ChunkedArray, what: str, file: tuple[Path, int] | None) -> list[Stored]:
    """The rows of each chunk; of a `file`, its path and where it is mapped."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    found: list[Stored] = []
    for array in (_array(chunk, what) for chunk in chunks if len(chunk)):
        found.append(array_rows(array, what, None if file is None else (file[0], array.ctypes.data - file[1])))
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
    found: np.ndarray = chunk.to_numpy(zero_copy_only=True)
    return found
