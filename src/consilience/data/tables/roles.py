"""The roles of a table's columns, as its owner declares them, and what the cells of a column look like."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from consilience.core.checks import Count, check_types
from consilience.core.errors import ConfigError, DataError, nearest
from consilience.core.text import listing
from consilience.data.tables.numbers import is_number, measured, resembles_number
from consilience.data.tables.reading import NONE, Table

MINIMUM = 5
Kind = Literal["numbers", "text", "dates", "nothing"]
_IDENTIFIERS = ("id", "nr", "no", "mrn", "uuid", "guid", "index", "number", "key", "record", "row", "pid")
_OUTCOMES = ("target", "outcome", "label", "class", "death", "died", "dead", "event", "status", "diagnosis", "y", "num")
_DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ].*)?|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}([T ].*)?", re.ASCII)
Names = Annotated[tuple[str, ...], Field(max_length=100_000)]


@dataclass(frozen=True)
class Roles:
    """Which columns of a table are used, and how. All sites of a federation have the same roles.

    `target` is the column to predict; two columns are a time and an event. `features` are the columns to predict from,
    by default all others but those in `ignore`. `categorical` are columns of numbers that are codes; columns of text
    are categorical anyway, unless `declared`: then a column of text that `categorical` does not name is ignored, and
    no site sends its values. With `numbers`, targets are real numbers also if all are whole. `classes` are the names
    of all classes, if they are known. A category with fewer than `minimum` rows at all sites together is not named,
    but counted with the others of its kind. `missing` are further marks of missing cells, such as -9."""

    target: Names
    features: Names | None = None
    ignore: Names = ()
    categorical: Names = ()
    numbers: bool = False
    classes: Names = ()
    minimum: Count = MINIMUM
    declared: bool = False
    missing: Names = ()

    @classmethod
    def of(
        cls,
        target: str | Sequence[str],
        *,
        features: Sequence[str] | None = None,
        ignore: Sequence[str] = (),
        categorical: Sequence[str] = (),
        missing: Sequence[str] = (),
        **more: Any,
    ) -> Roles:
        """Roles from lists of names, or single names."""
        chosen = None if features is None else _names(features)
        return cls(_names(target), chosen, _names(ignore), _names(categorical), missing=_names(missing), **more)

    def __post_init__(self) -> None:
        check_types(self)
        if len(self.target) not in (1, 2) or len(set(self.target)) < len(self.target):
            got = listing(self.target) or "none"
            raise ConfigError(f"target is one column, or two different ones, a time and an event; got {got}")
        for name in (*self.target, *self.ignore):
            if name in self.named:
                raise ConfigError(f"{name!r} cannot be a feature and also a target or ignored: name it once")

    @cached_property
    def named(self) -> frozenset[str]:
        """The columns that are declared as features."""
        return frozenset((*(self.features or ()), *self.categorical))

    @property
    def survival(self) -> bool:
        """Whether the targets are a time and an event."""
        return len(self.target) == 2

    def used(self, table: Table) -> list[str]:
        """The columns of a table that may become features, in the table's order."""
        chosen = set(table.columns if self.features is None else self.features)
        left_out = {*self.target, *self.ignore}
        return [name for name in table.columns if name in chosen and name not in left_out]

    def check(self, table: Table) -> None:
        """Refuse a table without its target, or with nothing else."""
        for name in self.target:
            if name not in table.columns:
                raise DataError(f"{table.name} has no column {name!r}; {_hint(name, table)}")
        if self.features and not set(self.features) & set(table.columns):
            raise DataError(
                f"{table.name} has no column {self.features[0]!r}; {nearest(self.features[0], table.columns)}"
            )
        if not self.used(table):
            raise DataError(f"{table.name}: a target and at least one feature are needed, got {list(table.columns)}")


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(map(str, given))


def _hint(name: str, table: Table) -> str:
    """Columns that may have been meant: of a similar name, or such as targets often are."""
    columns = list(table.columns)
    if difflib.get_close_matches(name.lower(), map(str.lower, columns), n=1, cutoff=0.75):
        return nearest(name, columns)
    likely = [column for column in columns if _words(column) & set(_OUTCOMES)]
    likely += [column for column, cells in table.columns.items() if len({cell for cell in cells if cell}) == 2]
    likely = list(dict.fromkeys([*likely, columns[-1]]))[:5]
    return f"name the column to predict as target=, perhaps {' or '.join(map(repr, likely))}"


def _words(name: str) -> set[str]:
    parts = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower()
    return set(re.split(r"[^a-z0-9]+", parts))


def names_identifier(column: str) -> bool:
    """Whether a column's name is that of numbers of patients or rows; an index without a name is one, too."""
    return (
        not column
        or column.lower().startswith("unnamed:")
        or column.lower() in _IDENTIFIERS
        or _last_word(column) in ("id", "uuid", "mrn")
    )


def may_name_identifier(column: str) -> bool:
    """Whether a column's name is that of such numbers, or else of a number of something, such as "case_nr"."""
    return names_identifier(column) or _last_word(column) in ("nr", "no", "number")


def _last_word(column: str) -> str:
    return re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", column).lower())[-1]


def same_but_for_spelling(names: Iterable[str]) -> tuple[str, str] | None:
    """Two names that differ in case, blanks and punctuation alone."""
    return _same(names, lambda name: re.sub(r"[\W_]+", "", name).lower() or name)


def same_words(labels: Iterable[str]) -> tuple[str, str] | None:
    """Two labels that differ in case and blanks alone. Signs count: "A+" is not "A-"."""
    return _same(labels, lambda label: " ".join(label.split()).casefold())


def _same(names: Iterable[str], plain: Callable[[str], str]) -> tuple[str, str] | None:
    seen: dict[str, str] = {}
    for name in names:
        if plain(name) in seen:
            return seen[plain(name)], name
        seen[plain(name)] = name
    return None


def kind_of(table: Table, column: str) -> Kind:
    """What a column holds: numbers, text, dates, or nothing if all cells are missing. A column that holds both
    is refused."""
    cells = table.columns[column]
    present = [(row, cell) for row, cell in enumerate(cells) if cell is not None and cell.lower() != NONE]
    numbers = [is_number(cell) for _, cell in present]
    if not present:
        return "nothing"
    if all(numbers):
        return "numbers"
    similar = [resembles_number(cell) for _, cell in present]
    if not any(similar):
        if all(_DATE.fullmatch(cell) for _, cell in present):
            return "dates"
        several = len({cell for _, cell in present}) < len(present)  # of identifiers, all differ
        if several and (odd := measured(cell for _, cell in present)):
            raise DataError(
                f"{table.where(present[0][0], column)} holds {odd!r}, as all rows hold a number with a unit or with "
                f"blanks: write numbers alone, or declare categorical = [{column!r}] or ignore = [{column!r}]"
            )
        return "text"
    row, cell = next(place for place, number in zip(present, numbers, strict=True) if not number)
    raise DataError(
        f"{table.where(row, column)} holds {cell!r}, which is not a number, and other rows hold numbers: correct it, "
        f"leave the cell empty if it is missing, or declare categorical = [{column!r}] or ignore = [{column!r}]"
    )
