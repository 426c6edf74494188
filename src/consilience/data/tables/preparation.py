"""A preparation: turns a table into model inputs, in the same way at every site and in every prediction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from consilience.core.errors import DataError
from consilience.core.text import listing
from consilience.data.tables.labels import class_numbers
from consilience.data.tables.numbers import spelled
from consilience.data.tables.reading import Table
from consilience.data.tables.roles import Names, Roles, same_but_for_spelling
from consilience.data.tables.statistics import Number, Real, event, numbers, target_kind

OTHER = "other"
FILE = "preparation.json"


@dataclass(frozen=True)
class Numeric:
    """A column of numbers becomes (x − mean)/sd, or 0 where it is missing; `missing` adds a column that says where. A
    column with the sd 0 is the latter alone."""

    name: str
    mean: Real
    sd: Annotated[Real, Field(ge=0)]
    missing: bool = False
    kind: Literal["numeric"] = "numeric"

    @property
    def features(self) -> tuple[str, ...]:
        return (self.name,) * (self.sd > 0) + (f"{self.name} missing",) * self.missing

    def encode(self, table: Table) -> npt.NDArray[np.float64]:
        """The features [N, F] of a table that has this column."""
        x, missing = np.zeros(len(table)), np.ones(len(table))
        found = numbers(table, self.name)
        rows = [row for row, _ in found]
        missing[rows] = 0
        if self.sd > 0:
            x[rows] = (np.array([value for _, value in found]) - self.mean) / self.sd
        return np.stack(([x] if self.sd > 0 else []) + ([missing] if self.missing else []), axis=1)


@dataclass(frozen=True)
class Categorical:
    """A column of categories becomes a column of 0 and 1 for each of them, one for all others if `other`, and one for
    missing cells if `missing`. Without such a column, these are 0 in all."""

    name: str
    categories: Names
    other: bool = False
    missing: bool = False
    kind: Literal["categorical"] = "categorical"

    @property
    def features(self) -> tuple[str, ...]:
        named = (*self.categories, OTHER) if self.other else self.categories
        return (*(f"{self.name}={category}" for category in named), *(f"{self.name} missing",) * self.missing)

    def strange(self, table: Table) -> str:
        """A sentence for cells of a table that are none of the categories and have no column for others, or ""."""
        cells = table.columns.get(self.name, ()) if not self.other else ()
        unknown = next((cell for cell in cells if cell is not None and spelled(cell) not in self.categories), None)
        what = f"column {self.name!r} of {table.name} holds categories that no site had, such as {unknown!r}"
        return "" if unknown is None else f"{what}: they count as none"

    def encode(self, table: Table) -> npt.NDArray[np.float64]:
        """The features [N, F] of a table that has this column."""
        cells, place = table.columns[self.name], {category: i for i, category in enumerate(self.categories)}
        x = np.zeros((len(cells), len(self.features) + 1))  # and a column that is dropped
        other = len(self.categories) if self.other else -1
        gone = len(self.features) - 1 if self.missing else -1
        columns = [gone if cell is None else place.get(spelled(cell), other) for cell in cells]
        x[np.arange(len(cells)), columns] = 1
        return x[:, :-1]


@dataclass(frozen=True)
class Target:
    """The column to predict, or a time and an event: `classes`, or real numbers if there are none. `counts` are the
    examples of each class among the rows whose targets the sites have counted."""

    columns: Names
    classes: Names = ()
    counts: tuple[Number, ...] = ()

    def read(self, table: Table) -> Tensor:
        """[N] numbers of classes, [N, 1] real numbers, or [N, 2] times and events."""
        target_kind(table, Roles(self.columns, numbers=not self.classes, classes=self.classes))
        first = [str(cell) for cell in table.columns[self.columns[0]]]
        if self.classes:
            return class_numbers(first, self.classes, table.name)
        values = [[float(cell)] for cell in first]
        if len(self.columns) == 2:
            values = [[*value, float(event(table, row, self.columns[1]))] for row, value in enumerate(values)]
        return torch.tensor(values)


@dataclass(frozen=True)
class Preparation:
    """The columns of tables, in order, as model inputs. It is made from sums over all sites, and has no row of any."""

    columns: tuple[Annotated[Numeric | Categorical, Field(discriminator="kind")], ...]
    target: Target
    ignored: Names = ()
    """Columns that some site has and that are not used."""
    missing: Names = ()
    """Further marks of missing cells."""

    def __post_init__(self) -> None:
        if len(set(self.feature_names)) < len(self.feature_names):
            twice = next(name for name in self.feature_names if self.feature_names.count(name) > 1)
            raise DataError(f"two features are called {twice!r}: rename the column {twice!r}")
        if not self.feature_names:
            raise DataError("no column is left to predict from: all are constant, missing or ignored")

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the model inputs, such as "age", "sex=f" and "age missing"."""
        return tuple(name for column in self.columns for name in column.features)

    def transform(self, table: Table, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The model inputs [N, features] of a table. A column that it lacks is missing in all rows, and a category that
        is not known counts as "other"."""
        table = table.without(self.missing)
        absent = Table(table.name, {column.name: [None] * len(table) for column in self.columns}, table.lines)
        parts = [column.encode(table if column.name in table.columns else absent) for column in self.columns]
        return torch.from_numpy(np.concatenate(parts, axis=1)).to(dtype)

    def differences(self, table: Table) -> list[str]:
        """In what a table differs from those that the preparation was made from, a sentence for each; a DataError for a
        table without any of the columns, or with another spelling of one."""
        known = {*(column.name for column in self.columns), *self.target.columns, *self.ignored}
        lacking = [column.name for column in self.columns if column.name not in table.columns]
        unknown = [name for name in table.columns if name not in known]
        for name in unknown:
            if pair := next(filter(None, (same_but_for_spelling((one, name)) for one in lacking)), None):
                raise DataError(f"{table.name} has a column {pair[1]!r}, and the model knows {pair[0]!r}: rename it")
        if len(lacking) == len(self.columns):
            raise DataError(f"{table.name} has none of the model's columns; it needs {_named(lacking)}")
        counts = "counts" if len(lacking) == 1 else "count"
        found = [f"{table.name} has no {_named(lacking)}, which {counts} as missing"] if lacking else []
        if len(unknown) == 1:
            found.append(f"{_named(unknown)} of {table.name} is not used: no site had it")
        elif unknown:
            found.append(f"{_named(unknown)} of {table.name} are not used: no site had them")
        table = table.without(self.missing)
        strange = [column.strange(table) for column in self.columns if isinstance(column, Categorical)]
        return found + [sentence for sentence in strange if sentence]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Preparation:
        """The preparation in JSON; a DataError if it is none."""
        try:
            return _PREPARATION.validate_json(text)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise DataError(f"this is no preparation of tables: {where}: {problem['msg']}") from error

    @classmethod
    def read(cls, path: str | Path) -> Preparation:
        """The preparation in a file, such as preparation.json of a run."""
        try:
            found = json.loads(Path(path).read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as a preparation: {error}") from error
        if isinstance(found, dict):
            found.pop("digest", None)  # of a run's file
        try:
            return cls.from_json(json.dumps(found))
        except DataError as error:
            raise DataError(f"{path}: {error}") from error


_PREPARATION = TypeAdapter(Preparation)


def _named(names: Sequence[str]) -> str:
    shown = [repr(name) for name in names[:5]] + ([f"{len(names) - 5} more"] if len(names) > 5 else [])
    return f"column{'s' * (len(names) > 1)} {listing(shown)}"
