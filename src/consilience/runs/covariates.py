"""What the coefficients of a linear model are about: the columns of a table, or the inputs as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from consilience.data import Dataset
from consilience.data.tables.preparation import Categorical, Numeric


@dataclass
class Covariates:
    """Names [R], the difference in a column that each coefficient is for (0 if the column is not one of numbers), and
    the coefficients as linear functions of those of the inputs [R, D]."""

    width: int
    names: list[str] = field(default_factory=list)
    per: list[float] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, data: Dataset, width: int) -> Covariates:
        """One for each input, or those of the table that the inputs are prepared from.

        Of a column of numbers, the coefficient is for one standard deviation, or for 1 if all numbers are 0 and 1. A
        category's is its difference from the first category of its column: the inputs have a column for every category,
        so one alone depends on the prior."""
        found, preparation = cls(width), data.preparation
        if preparation is None or len(preparation.feature_names) != width:
            names = data.features if len(data.features) == width else tuple(f"x{i}" for i in range(width))
            for place, name in enumerate(names):
                found._add(name, {place: 1.0})
            return found
        place = 0
        for column in preparation.columns:
            if isinstance(column, Numeric):
                found._numbers(column, place)
            else:
                found._categories(column, place)
            place += len(column.features)
        return found

    @property
    def matrix(self) -> Tensor:
        """[R, D]."""
        return torch.stack(self.rows)

    def _numbers(self, column: Numeric, place: int) -> None:
        zeros_and_ones = math.isclose(column.sd**2, column.mean * (1 - column.mean), rel_tol=1e-9)
        for at, name in enumerate(column.features):
            per = 0.0 if name != column.name else 1.0 if zeros_and_ones else column.sd
            self._add(name, {place + at: per / column.sd if per else 1.0}, per)

    def _categories(self, column: Categorical, place: int) -> None:
        reference, *others = column.features
        against = reference.removeprefix(f"{column.name}=")
        for at, name in enumerate(others, 1):
            self._add(f"{name} vs {against}", {place + at: 1.0, place: -1.0})

    def _add(self, name: str, weights: dict[int, float], per: float = 0.0) -> None:
        row = torch.zeros(self.width, dtype=torch.float64)
        row[list(weights)] = torch.tensor(list(weights.values()), dtype=torch.float64)
        self.names.append(name)
        self.per.append(per)
        self.rows.append(row)
