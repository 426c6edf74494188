"""Tables as people have them, as columns of text: CSV files in several dialects, and data frames."""

from __future__ import annotations

import csv
import io
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from consilience.core.errors import DataError
from consilience.data.tables.numbers import Cells, spelled, with_points

log = logging.getLogger("consilience")
CSV = "*.[cC][sS][vV]"  # Path.glob is case-sensitive, and some programs write .CSV
MISSING = ("", "?", "-", ".", "na", "n/a", "#n/a", "nan", "null", "<na>")
NONE = "none"  # a missing number, but a category in a column of text: "previous disease: none"
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "pipes"}
_SEPARATOR = re.compile(r"sep=([,;\t|])\r?\n")  # the first line that some spreadsheets write


@dataclass(frozen=True)
class Table:
    """Columns of text, with None for missing cells and decimal points in numbers. `lines` has the place of every row
    in its source, for messages."""

    name: str
    columns: Mapping[str, Cells]
    lines: Sequence[int | str]

    def __len__(self) -> int:
        return len(self.lines)

    def take(self, rows: Sequence[int]) -> Table:
        """The table of these rows."""
        columns = {name: [cells[row] for row in rows] for name, cells in self.columns.items()}
        return Table(self.name, columns, [self.lines[row] for row in rows])

    def without(self, marks: Sequence[str]) -> Table:
        """The table with cells such as -9 as missing ones."""
        if not marks:
            return self
        gone = set(map(spelled, marks))
        columns = {
            name: [None if cell is not None and spelled(cell) in gone else cell for cell in cells]
            for name, cells in self.columns.items()
        }
        return replace(self, columns=columns)

    def where(self, row: int, column: str) -> str:
        """The place of a cell, for messages."""
        return f"{self.name}, line {self.lines[row]}: column {column!r}"


def is_table(source: Any) -> bool:
    """Whether `as_table` reads the source: a table, a path, or an object with named columns."""
    return isinstance(source, Table | str | Path) or (not isinstance(source, Mapping) and _names(source) is not None)


def as_table(source: Any, name: str = "the table") -> Table:
    """A table from a CSV file, or from an object with columns, such as a pandas, polars or pyarrow table."""
    if isinstance(source, Table):
        return source
    if isinstance(source, str | Path):
        return read_csv(Path(source).expanduser())
    names = _names(source)
    if names is None or isinstance(source, Mapping):
        raise DataError(f"a CSV file or a table with columns is expected, got {type(source).__name__}")
    if len(set(map(str, names))) < len(names):
        raise DataError(f"{name}: each column needs its own name, got {list(map(str, names))}")
    values = {str(key): _values(source[key]) for key in names}
    columns: dict[str, Cells] = {key: [_text(value) for value in column] for key, column in values.items()}
    lines = range(1, len(next(iter(columns.values()), ())) + 1)
    text = {key: columns[key] for key, column in values.items() if any(isinstance(value, str) for value in column)}
    return Table(name, columns | with_points(name, text, lines, ""), lines)


def joined(tables: Sequence[Table]) -> Table:
    """The rows of several tables; a column that one of them lacks is missing there."""
    if len(tables) == 1:
        return tables[0]
    names = dict.fromkeys(name for table in tables for name in table.columns)
    columns = {
        name: [cell for table in tables for cell in table.columns.get(name, [None] * len(table))] for name in names
    }
    lines = [f"{line} of {table.name}" for table in tables for line in table.lines]
    return Table(f"{tables[0].name} and {len(tables) - 1} more", columns, lines)


def read_csv(path: Path) -> Table:
    """The table of a CSV file with column names in its first line, and commas, semicolons, tabs or pipes between the
    cells.

    A row is a line: a quote that is left open would take the rows after it into its cell."""
    name, text = str(path), _decoded(path)
    told = _SEPARATOR.match(text)
    text, before = (text[told.end() :], 1) if told else (text, 0)
    delimiter = told[1] if told else _delimiter(name, text)
    rows = _rows(name, text, delimiter, before)
    head = [cell.strip() for cell in next(rows, (1, []))[1]]
    if not any(head):
        raise DataError(f"{path} is empty, or its first line is")
    lines, cells = [], []
    for number, row in rows:
        if not any(cell.strip() for cell in row):
            continue  # spreadsheets write rows of empty cells
        if len(row) != len(head):
            raise DataError(f"{path}, line {number}: {len(row)} cells, but the first line names {len(head)} columns")
        lines.append(number)
        cells.append([_cell(cell) for cell in row])
    if not cells:
        raise DataError(f"{path} has no rows")
    found = [(column, own) for column, own in zip(head, zip(*cells, strict=True), strict=True) if column or any(own)]
    columns = dict(found)  # spreadsheets write columns of empty cells
    if len(columns) < len(found):
        raise DataError(f"{path}: each column needs its own name, got {head}")
    return Table(name, with_points(name, columns, lines, delimiter), lines)


def _decoded(path: Path) -> str:
    """The text of a file in UTF-8 or UTF-16, or else in Windows-1252, which spreadsheets write in Western Europe."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    try:
        text = data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("cp1252", errors="replace")
        if "\x00" not in text:
            log.warning("%s is not in UTF-8: it is read as Windows-1252 (Western European)", path)
    if "\x00" in text:
        raise DataError(f"{path} is no text: save the table as CSV in UTF-8")
    return text


def _delimiter(name: str, text: str) -> str:
    """The sign between cells: the one that divides the first line and, if there are several, each row alike."""
    heads = {sign: _first(text, sign) for sign in _DELIMITERS}
    found = [sign for sign, head in heads.items() if len(head) > 1]
    if len(found) > 1:
        fits = [sign for sign in found if _divides(text, sign, len(heads[sign]))]
        if len(fits) != 1:
            signs = " and ".join(_DELIMITERS[sign] for sign in found)
            raise DataError(
                f"{name}: its first line has {signs}, and it is not clear which of them separate cells: use one of "
                "them, and put names that contain another into quotes"
            )
        found = fits
    return found[0] if found else ","


def _first(text: str, sign: str) -> list[str]:
    try:
        return next(csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=sign), [])
    except csv.Error:
        return []


def _divides(text: str, sign: str, width: int) -> bool:
    try:
        return all(
            len(row) == width for row in csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=sign) if row
        )
    except csv.Error:
        return False


def _rows(name: str, text: str, delimiter: str, before: int) -> Iterator[tuple[int, list[str]]]:
    """The cells of the rows that are not empty, each with the number of its line in a file with so many lines `before`
    the text; only the first row may span lines."""
    number = first = before + 1
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
        for row in reader:
            if reader.line_num + before > number > first:
                raise DataError(
                    f"{name}, line {number}: a quote that opens here is not closed in the same line: close it, or "
                    "replace line breaks in cells by blanks"
                )
            if row or number == first:
                yield number, row
            number = reader.line_num + before + 1
    except csv.Error as error:
        raise DataError(f"{name}, line {number}: {error}; is a quote that opens here not closed?") from error


def _cell(text: str) -> str | None:
    text = text.strip()
    return None if text.lower() in MISSING else text


def _names(source: Any) -> list[Any] | None:
    names = getattr(source, "column_names", None)
    names = getattr(source, "columns", None) if names is None else names
    return None if names is None or isinstance(names, Mapping) else list(names)


def _values(column: Any) -> list[Any]:
    for method in ("to_pylist", "tolist", "to_list"):
        if hasattr(column, method):
            return list(getattr(column, method)())
    return list(column)


def _text(value: Any) -> str | None:
    """A value of a data frame as the cell of a CSV file."""
    if value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value):
        return None
    return _cell(str(value))
