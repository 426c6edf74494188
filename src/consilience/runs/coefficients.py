"""Coefficients of linear models: posterior means, credible intervals, and hazard or odds ratios."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from consilience.core import Belief, DataError, Gaussian, TaskError, text
from consilience.core.display import clip, table
from consilience.core.errors import nearest
from consilience.data import Dataset
from consilience.models import ProportionalHazards
from consilience.runs.covariates import Covariates
from consilience.runs.rows import frame
from consilience.tasks import Supervised, Task
from consilience.tasks.likelihoods import Hazards, Likelihood

if TYPE_CHECKING:
    import pandas

LEVEL = 0.95
LARGEST = 500  # coefficients of a table in a run's directory
EVERYONE, NEWCOMER = "all clients", "a new client"
_SHAPES = (nn.Flatten, nn.Identity)  # layers that a linear model may have besides its linear one


@dataclass(frozen=True, eq=False)
class Coefficients:
    """The posterior N(mean, sd²) of each coefficient. With `exp`, estimates and intervals are those of e^coefficient,
    a `ratio` such as the hazard ratio: the estimate is its posterior median. `per` is the difference in each covariate
    that a coefficient is for, 0 where it is that of the inputs as they are; without any, `per` is empty."""

    names: tuple[str, ...]
    mean: Tensor
    sd: Tensor
    ratio: str = ""
    of: str = EVERYONE
    level: float = LEVEL
    exp: bool = False
    per: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise DataError(f"level is a probability between 0 and 1, got {self.level}")

    @property
    def estimate(self) -> Tensor:
        """The posterior mean of each coefficient, or the median of its ratio."""
        return self._scaled(self.mean)

    @property
    def lower(self) -> Tensor:
        """The lower end of the credible interval."""
        return self._scaled(self.mean - self._width)

    @property
    def upper(self) -> Tensor:
        """The upper end of the credible interval."""
        return self._scaled(self.mean + self._width)

    @property
    def sign(self) -> Tensor:
        """The posterior probability that a coefficient has the sign of its mean."""
        found: Tensor = torch.special.ndtr(self.mean.abs() / self.sd)
        return found

    @property
    def _width(self) -> Tensor:
        return self.sd * math.sqrt(2) * torch.erfinv(torch.tensor(self.level, dtype=torch.float64)).item()

    def _scaled(self, value: Tensor) -> Tensor:
        return value.exp() if self.exp else value

    @property
    def labels(self) -> list[str]:
        """The names with the differences that coefficients are for, such as "age (per 10)"."""
        per = self.per or (0.0,) * len(self.names)
        return [f"{name} (per {size:.3g})" if size else name for name, size in zip(self.names, per, strict=True)]

    def rescaled(self, per: Mapping[str, float]) -> Coefficients:
        """The same for other differences in columns of numbers, such as {"age": 10}."""
        sizes = list(self.per)
        for column, size in per.items():
            rows = [row for row, name in enumerate(self.names) if self._is_number(row, name, column)]
            if not rows:
                numbers = [name for name, one in zip(self.names, self.per, strict=False) if one]
                known = nearest(column, numbers) if numbers else "the inputs are not prepared from tables"
                raise DataError(f"per: there is no column of numbers {column!r}; {known}")
            if not 0 < size < math.inf:
                raise DataError(f"per: the difference in {column!r} is a positive number, got {size}")
            for row in rows:
                sizes[row] = float(size)
        factor = torch.tensor([new / old if old else 1.0 for new, old in zip(sizes, self.per, strict=True)]).double()
        return replace(self, mean=self.mean * factor, sd=self.sd * factor, per=tuple(sizes)) if per else self

    def _is_number(self, row: int, name: str, column: str) -> bool:
        """Whether a row is about this column of numbers, perhaps for one of several classes."""
        return bool(self.per and self.per[row]) and (name == column or name.endswith(f": {column}"))

    @property
    def title(self) -> str:
        """The name of the estimates."""
        return (self.ratio or "exp(coefficient)") if self.exp else "coefficient"

    def rows(self) -> list[dict[str, Any]]:
        """A row for each coefficient. `mean` and `sd` are those of the coefficient itself."""
        columns = [self.mean, self.sd, self.estimate, self.lower, self.upper, self.sign]
        names = ("mean", "sd", self.title.replace(" ", "_"), "lower", "upper", "probability_of_sign")
        values = zip(*(column.tolist() for column in columns), strict=True)
        return [
            {"name": name, **dict(zip(names, row, strict=True))} for name, row in zip(self.labels, values, strict=True)
        ]

    def frame(self) -> pandas.DataFrame:
        """The table as a data frame; needs pandas."""
        return frame(self.rows())

    @property
    def head(self) -> list[str]:
        """The columns of the printed table."""
        return [self.title, f"{self.level * 100:g} % interval", "P(sign)"]

    def cells(self) -> list[list[str]]:
        """The cells of the printed table, by row."""
        values = zip(*(column.tolist() for column in (self.estimate, self.lower, self.upper, self.sign)), strict=True)
        return [[f"{at:.3f}", f"{low:.3f} to {high:.3f}", f"{sign:.3f}"] for at, low, high, sign in values]

    def __repr__(self) -> str:
        named = zip(self.labels, self.cells(), strict=True)
        lines = [["", *self.head], *([clip(name, 30), *row] for name, row in named)]
        first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
        body = (
            [name.ljust(first), *(cell.rjust(width) for cell, width in zip(row, others, strict=True))]
            for name, *row in lines
        )
        return "\n".join([f"Coefficients of {self.of}", *("  ".join(row) for row in body)])

    def _repr_html_(self) -> str:
        rows = [[name, *row] for name, row in zip(self.labels, self.cells(), strict=True)]
        return table(["", *self.head], rows, f"Posterior of {self.of}.")

    def to_json(self) -> dict[str, Any]:
        """Means and standard deviations as plain data."""
        return {"of": self.of, "mean": self.mean.tolist(), "sd": self.sd.tolist()}


def coefficients(
    task: Task,
    belief: Belief,
    data: Dataset,
    *,
    of: str = EVERYONE,
    level: float = LEVEL,
    exp: bool | None = None,
) -> Coefficients:
    """The coefficients of a linear model under a belief, without intercepts. `exp` None takes ratios where the task has
    them."""
    names, per, contrasts = _contrasts(task, data)
    if not isinstance(belief, Gaussian):
        raise TaskError(
            "the method has weights without a posterior, so coefficients have no intervals: use FedEP or "
            "PartialPooling with inference.Newton"
        )
    q = Gaussian(belief.eta.detach().cpu().double(), belief.lam.detach().cpu().double()).proper()
    mean = contrasts @ q.mean
    if q.full:
        root = torch.linalg.cholesky(q.lam)
        variance = torch.linalg.solve_triangular(root, contrasts.T, upper=False).square().sum(0)
    else:
        variance = contrasts.square() @ q.variance
    ratio = _likelihood(task).ratio or ""
    return Coefficients(names, mean, variance.sqrt(), ratio, of, level, bool(ratio) if exp is None else exp, per)


def has_coefficients(task: Task, belief: Belief) -> bool:
    """Whether `coefficients` gives a table that is worth storing."""
    if not isinstance(belief, Gaussian) or not isinstance(task, Supervised) or task.likelihood.ratio is None:
        return False
    found = _linear(task.module)
    return found is not None and found[1].weight.requires_grad and found[1].weight.numel() <= LARGEST


def _likelihood(task: Task) -> Likelihood:
    if not isinstance(task, Supervised) or task.likelihood.ratio is None:
        raise TaskError(
            f"coefficients of a {task.kind} task have no meaning of their own: tasks with coefficients are Cox, "
            "DiscreteHazards, Binary, Classification, MultiLabel, Poisson and Regression"
        )
    return task.likelihood


def _linear(module: nn.Module) -> tuple[str, nn.Linear] | None:
    """The one linear layer of a linear module and its name; None if the module is not linear by its structure."""
    if isinstance(module, ProportionalHazards):
        return "linear", module.linear
    inner = list(module.named_children()) if isinstance(module, nn.Sequential) else [("", module)]
    found = [(name, layer) for name, layer in inner if not isinstance(layer, _SHAPES)]
    if len(found) != 1 or type(found[0][1]) is not nn.Linear:
        return None
    return found[0][0], found[0][1]


def _contrasts(task: Task, data: Dataset) -> tuple[tuple[str, ...], tuple[float, ...], Tensor]:
    """The names of coefficients, the differences that they are for, and their matrix [R, P]: a coefficient is a linear
    function of θ. Those of classes are differences from the first class."""
    likelihood, found = _likelihood(task), _linear(task.module)
    if found is None:
        raise TaskError(
            f"coefficients are those of a linear module, such as nn.Linear or cs.models.ProportionalHazards, and "
            f"{type(task.module).__name__} is not one"
        )
    name, layer = found
    parameter = f"{name}.weight" if name else "weight"
    if parameter not in task.main.names:
        raise TaskError(f"the weights of the linear layer, {parameter}, are frozen, so they have no posterior")
    start, (outputs, width) = task.slice(parameter=parameter).start, layer.weight.shape
    weights = torch.zeros(outputs, width, task.size, dtype=torch.float64)
    each = torch.arange(outputs * width)
    weights.view(outputs * width, -1)[each, start + each] = 1
    covariates = Covariates.of(data, width)
    kinds = data.classes if len(data.classes) == outputs else tuple(map(str, range(outputs)))
    if isinstance(likelihood, Hazards) and outputs > 1:
        kinds = tuple(f"until {end:g}" for end in likelihood.ends.tolist())
    if likelihood.categorical and outputs > 1:
        weights, kinds = weights[1:] - weights[:1], kinds[1:]
    names = [name if len(kinds) == 1 else f"{kind}: {name}" for kind in kinds for name in covariates.names]
    per = tuple(covariates.per) * len(kinds) if any(covariates.per) else ()
    return tuple(names), per, torch.einsum("rd,odp->orp", covariates.matrix, weights).reshape(len(names), -1)


def to_json(found: Sequence[Coefficients]) -> dict[str, Any]:
    """Coefficients of several beliefs about one model, as evaluation.json holds them."""
    beliefs = [one.to_json() for one in found]
    return {"names": list(found[0].names), "per": list(found[0].per), "ratio": found[0].ratio, "beliefs": beliefs}


def from_json(content: Mapping[str, Any]) -> dict[str, Coefficients]:
    """The same by the names of the beliefs."""
    names, ratio = tuple(content["names"]), str(content["ratio"])
    return {
        one["of"]: Coefficients(
            names,
            torch.tensor(one["mean"], dtype=torch.float64),
            torch.tensor(one["sd"], dtype=torch.float64),
            ratio,
            str(one["of"]),
            exp=bool(ratio),
            per=tuple(content.get("per", ())),
        )
        for one in content["beliefs"]
    }


def stored(content: Mapping[str, Any], of: str, level: float, exp: bool | None) -> Coefficients:
    """The coefficients of one belief from the content of evaluation.json."""
    found = from_json(content["coefficients"]) if content.get("coefficients") else {}
    if of not in found:
        known = f"; it has those of {text.listing(list(found))}" if found else ""
        raise DataError(f"the run has stored no coefficients of {of}{known}")
    return replace(found[of], level=level, exp=found[of].exp if exp is None else exp)
