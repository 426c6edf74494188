"""Numbers as people write them: with decimal points or commas, and perhaps with thousands separators."""

import re
from collections.abc import Iterable, Mapping, Sequence

from consilience.core.errors import DataError

Cells = Sequence[str | None]
_EXPONENT = r"(?:[eE][+-]?\d+)?"
_PLAIN = {
    ".": re.compile(rf"[+-]?(?:\d+(?:\.\d*)?|\.\d+){_EXPONENT}", re.ASCII),
    ",": re.compile(rf"[+-]?(?:\d+(?:,\d*)?|,\d+){_EXPONENT}", re.ASCII),
}
_GROUPED = {
    ".": re.compile(r"[+-]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?", re.ASCII),
    ",": re.compile(r"[+-]?[1-9]\d{0,2}(?:\.\d{3})+(?:,\d+)?", re.ASCII),
}
_SIGNS = (".", ",")
_MEASURED = re.compile(r"[+-]?\d(?:[\d.,\s'’]*\d)?\s*([^\d\s.,'’+-][^\d\s]*)?")


def is_number(cell: str) -> bool:
    """Whether a cell is a number with a decimal point, without thousands separators. Infinities are not."""
    return _PLAIN["."].fullmatch(cell) is not None


def resembles_number(cell: str) -> bool:
    """Whether a cell is a number with either decimal sign."""
    return any(_fits(cell, sign) for sign in _SIGNS)


def measured(cells: Iterable[str]) -> str | None:
    """The first of cells that are all numbers with the same unit, or with blanks between digits; else None."""
    cells = list(cells)
    found = [_MEASURED.fullmatch(cell) for cell in cells]
    return cells[0] if cells and len({one and one[1] for one in found}) == 1 and all(found) else None


def is_whole(cell: str) -> bool:
    """Whether a cell is a whole number, such as 1 or 1.0."""
    return is_number(cell) and float(cell).is_integer()


def spelled(cell: str) -> str:
    """A category or label in one spelling: programs write 1 as 1.0 or 01, and true as True or TRUE."""
    if not is_number(cell):
        return cell.lower() if cell.lower() in ("true", "false") else cell
    value = float(cell)
    return str(int(value)) if value.is_integer() else repr(value)


def with_points(
    name: str, columns: Mapping[str, Cells], lines: Sequence[int | str], delimiter: str
) -> dict[str, Cells]:
    """The columns of a table with decimal points in all numbers.

    A column is read by the decimal sign with which all its cells are numbers. If both signs are possible, as for 1.234,
    the other columns decide, provided that the separator is then a decimal sign; else a DataError names the cell. With
    commas between cells, the decimal sign is a point."""
    signs = {column: _signs(cells) for column, cells in columns.items()}
    known = {"."} if delimiter == "," else {sign for found in signs.values() if len(found) == 1 for sign in found}
    read: dict[str, Cells] = {}
    for column, cells in columns.items():
        found = signs[column]
        if len(found) > 1 and len(known) == 1 and _all_match(_PLAIN[next(iter(known))], cells):
            found = known
        if not found:  # text, or whole numbers only
            read[column] = cells
        elif len(found) > 1:
            raise _unclear(name, column, cells, lines, "may be a decimal number or one with a thousands separator")
        elif found == {","} and delimiter == ",":
            raise _unclear(name, column, cells, lines, "has a decimal comma, in a file with commas between the cells")
        else:
            (sign,) = found
            read[column] = [None if cell is None else _with_point(cell, sign) for cell in cells]
    return read


def _all_match(pattern: re.Pattern[str], cells: Cells) -> bool:
    return all(pattern.fullmatch(cell) for cell in _present(cells))


def _present(cells: Cells) -> Iterable[str]:
    return (cell for cell in cells if cell is not None)


def _fits(cell: str, sign: str) -> bool:
    return _PLAIN[sign].fullmatch(cell) is not None or _GROUPED[sign].fullmatch(cell) is not None


def _signs(cells: Cells) -> set[str]:
    """The decimal signs with which all cells are numbers; none for text, and for whole numbers without separators."""
    found = {sign for sign in _SIGNS if all(_fits(cell, sign) for cell in _present(cells))}
    separated = len(found) < 2 or any("." in cell or "," in cell for cell in _present(cells))
    return found if separated else set()


def _with_point(cell: str, sign: str) -> str:
    if _PLAIN["."].fullmatch(cell) and sign == ".":
        return cell
    other = "," if sign == "." else "."
    return cell.replace(other, "").replace(",", ".")


def _unclear(name: str, column: str, cells: Cells, lines: Sequence[int | str], what: str) -> DataError:
    row = next(i for i, cell in enumerate(cells) if cell is not None and ("." in cell or "," in cell))
    return DataError(
        f"{name}, line {lines[row]}: column {column!r} holds {cells[row]!r}, which {what}: write numbers with decimal "
        "points, without thousands separators, and commas between the cells"
    )
