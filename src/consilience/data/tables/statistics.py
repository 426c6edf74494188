"""What a site says about its table: sums that add up over sites, as if all rows were in one table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from consilience.core.errors import DataError
from consilience.data.tables.labels import class_numbers
from consilience.data.tables.numbers import Cells, is_number, is_whole, spelled
from consilience.data.tables.reading import NONE, Table
from consilience.data.tables.roles import Kind, Roles, kind_of, may_name_identifier

LARGEST = 1e100  # numbers whose squares and sums are finite
Real = Annotated[float, Field(allow_inf_nan=False)]
Number = Annotated[int, Field(ge=0, le=10**12)]
Exact = tuple[Real, Real, Real]
"""A sum as three numbers that add up to it: the first is the sum rounded, the others are what rounding has lost."""
TargetKind = Literal["whole", "real", "names", "mixed", "survival"]
ZERO: Exact = (0.0, 0.0, 0.0)


def exact_sum(values: Iterable[float]) -> Exact:
    """The sum in three numbers, so that it does not depend on the order of the values, or on the sites."""
    values = list(values)
    first = math.fsum(values)
    second = math.fsum([*values, -first])
    return first, second, math.fsum([*values, -first, -second])


def exact_squares(x: npt.NDArray[np.float64]) -> Exact:
    """The sum of squares. By Dekker's product, x² is p + e without rounding."""
    p, split = x * x, x * 134217729.0  # 2²⁷ + 1
    high = split - (split - x)
    low = x - high
    e = low * low - ((p - high * high) - 2 * high * low)
    return exact_sum([*p.tolist(), *e.tolist()])


def fraction(value: Exact) -> Fraction:
    """The sum, without rounding."""
    return sum(map(Fraction, value), Fraction(0))


@dataclass(frozen=True)
class Column:
    """A column of one table, or of all: how many cells are missing, Σx and Σx² of numbers, and how often each category
    occurs. `distinct` is true for numbers of patients or rows, by their name, that are all different."""

    kind: Kind
    missing: Number = 0
    count: Number = 0
    first: Exact = ZERO
    second: Exact = ZERO
    categories: Mapping[str, Number] = field(default_factory=dict)
    distinct: bool = True

    def __add__(self, other: Column) -> Column:
        kind = other.kind if self.kind == "nothing" else self.kind
        if {self.kind, other.kind} == {"dates", "text"}:
            kind = "text"
        return Column(
            kind,
            self.missing + other.missing,
            self.count + other.count,
            exact_sum([*self.first, *other.first]),
            exact_sum([*self.second, *other.second]),
            dict(Counter(self.categories) + Counter(other.categories)),
            self.distinct and other.distinct,
        )

    @property
    def mean(self) -> float:
        return float(fraction(self.first) / self.count)

    @property
    def variance(self) -> Fraction:
        """The population variance, exact as the sums are: 0 for a constant."""
        return fraction(self.second) / self.count - (fraction(self.first) / self.count) ** 2


@dataclass(frozen=True)
class Summary:
    """A site's table in sums: the columns that it has and, for classes, how often each occurs among the targets."""

    roles: Roles
    rows: Number
    columns: Mapping[str, Column]
    target: TargetKind
    labels: Mapping[str, Number] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse what no table can have, in a summary of another machine."""
        for name, column in self.columns.items():
            if column.count + sum(column.categories.values()) + column.missing > self.rows:
                raise DataError(f"column {name!r} has more cells than rows")
            if column.count and column.variance < -abs(fraction(column.second)) * Fraction(1, 10**12):
                raise DataError(f"the sums of column {name!r} have a negative variance")
        if sum(self.labels.values()) > self.rows:
            raise DataError("there are more targets than rows")


def summarise(table: Table, roles: Roles, training: Sequence[int] | None = None) -> Summary:
    """The summary of a table. Targets are counted in the rows `training`, by default in all."""
    table = table.without(roles.missing)
    if not len(table):
        raise DataError(f"{table.name} has no rows")
    roles.check(table)
    columns = {name: summarise_column(table, name, roles) for name in roles.used(table)}
    rows = range(len(table)) if training is None else training
    kind = target_kind(table, roles)
    labels: Counter[str] = Counter()
    if kind == "survival":
        labels.update(str(event(table, row, roles.target[1])) for row in rows)
    elif kind != "real":
        cells = table.columns[roles.target[0]]
        named = [str(cell) for cell in cells]
        if roles.classes:
            named = [roles.classes[number] for number in class_numbers(named, roles.classes, table.name).tolist()]
        labels.update(spelled(named[row]) for row in rows)
        labels.update({spelled(cell): 0 for cell in named})  # classes that only rows held out have
    return Summary(roles, len(table), columns, kind, dict(labels))


def summarise_column(table: Table, name: str, roles: Roles) -> Column:
    """The sums of a column."""
    cells = table.columns[name]
    if name in roles.categorical:
        return _categories(cells, "text")
    kind = kind_of(table, name)
    if kind == "numbers":
        values = [value for _, value in numbers(table, name)]
        x = np.array(values)
        distinct = not may_name_identifier(name) or _different(values)
        return Column(kind, len(cells) - len(x), len(x), exact_sum(values), exact_squares(x), distinct=distinct)
    found = _categories(cells, kind)
    if roles.declared:  # the values stay at the site
        return Column(kind, len(cells) if kind == "nothing" else found.missing)
    return found


def _different(values: Sequence[float]) -> bool:
    return len(set(values)) == len(values) and all(value.is_integer() for value in values)


def _categories(cells: Cells, kind: Kind) -> Column:
    categories = Counter(spelled(cell) for cell in cells if cell is not None)
    return Column(kind, len(cells) - categories.total(), categories=dict(categories))


def numbers(table: Table, name: str) -> list[tuple[int, float]]:
    """The numbers of a column with their rows, without missing cells; a DataError for anything else."""
    found = []
    for row, cell in enumerate(table.columns[name]):
        if cell is None or cell.lower() == NONE:
            continue
        value = float(cell) if is_number(cell) else math.nan
        if not abs(value) < LARGEST:
            what = "is not a number" if math.isnan(value) else "is too large"
            raise DataError(f"{table.where(row, name)} holds {cell!r}, which {what}")
        found.append((row, value))
    return found


def target_kind(table: Table, roles: Roles) -> TargetKind:
    """What the targets are; a DataError names a row without one."""
    for name in roles.target:
        for row, cell in enumerate(table.columns[name]):
            if cell is None:
                raise DataError(f"{table.name}, line {table.lines[row]}: the target is missing: drop the row")
    cells = [str(cell) for cell in table.columns[roles.target[0]]]
    if roles.numbers or roles.survival:
        odd = next((cell for cell in cells if not is_number(cell)), None)
        if odd is not None:
            raise DataError(f"{table.name}: the target {odd!r} is not a number, which the task needs")
        early = next((row for row, cell in enumerate(cells) if roles.survival and float(cell) < 0), None)
        if early is not None:
            raise DataError(f"{table.where(early, roles.target[0])} holds {cells[early]!r}, and times are not negative")
        return "survival" if roles.survival else "real"
    kinds = {is_number(cell) for cell in cells}
    if kinds != {True}:
        return "mixed" if True in kinds else "names"
    return "whole" if roles.classes or all(map(is_whole, cells)) else "real"


def event(table: Table, row: int, column: str) -> int:
    """1 for an event, 0 for a censored time."""
    cell = str(table.columns[column][row]).lower()
    code = {"0": 0, "1": 1, "false": 0, "true": 1}.get(spelled(cell))
    if code is None:
        raise DataError(f"{table.where(row, column)} must be 1 for an event, or 0 if the time is censored")
    return code
