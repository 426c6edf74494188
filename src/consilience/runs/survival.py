"""Survival curves of a run: means and credible bands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from consilience.core import Belief, DataError, TaskError
from consilience.data import Dataset, Federation
from consilience.evaluation.baseline import HazardSums, at, event_times
from consilience.evaluation.predictions import Inputs, networks_of, predict_each, unlabelled
from consilience.runs.rows import frame
from consilience.tasks import Task
from consilience.tasks.likelihoods import Hazards, PartialLikelihood

if TYPE_CHECKING:
    import pandas

SAMPLES = 200  # draws of a posterior that bands are quantiles of
LEVEL = 0.95


@dataclass(frozen=True, eq=False)
class SurvivalCurves:
    """S(t | x) after each of `times` [T]: the posterior mean [N, T], and a pointwise credible band of `level`."""

    times: Tensor
    mean: Tensor
    lower: Tensor
    upper: Tensor
    level: float = LEVEL

    def __repr__(self) -> str:
        first, last = (float(self.times[i]) for i in (0, -1))
        return f"SurvivalCurves({len(self.mean)} examples, {len(self.times)} times from {first:g} to {last:g})"

    def frame(self) -> pandas.DataFrame:
        """A row for each example and time; needs pandas."""
        rows = [
            {"example": i, "time": t, "survival": m, "lower": low, "upper": high}
            for i, curves in enumerate(zip(self.mean.tolist(), self.lower.tolist(), self.upper.tolist(), strict=True))
            for t, m, low, high in zip(self.times.tolist(), *curves, strict=True)
        ]
        return frame(rows)


def survival_curves(
    task: Task,
    belief: Belief,
    strata: Sequence[Dataset],
    x: Inputs,
    *,
    times: Sequence[float] | Tensor | None = None,
    level: float = LEVEL,
    samples: int = SAMPLES,
    seed: int = 0,
) -> SurvivalCurves:
    """The curves for inputs x under a belief. For Cox, the baseline hazard is Breslow's over the patients of `strata`
    together; the band has its uncertainty, too. `times` are by default those of events, or the ends of intervals."""
    if not 0 < level < 1:
        raise DataError(f"level is a probability between 0 and 1, got {level}")
    inputs, likelihood = unlabelled(x, ()), task.likelihood
    draws = _draws(task, belief, inputs, samples, seed)
    if isinstance(likelihood, Hazards):
        knots, log_survival = likelihood.ends.cpu().double(), draws.double().clamp_min(1e-300).log()
    elif isinstance(likelihood, PartialLikelihood):
        sums = _sums(task, belief, strata, samples, seed)
        hazard = sums.cumulative(seed if len(sums.at_risk) > 1 else None)
        knots, log_survival = sums.times, -hazard.unsqueeze(1) * draws.double().exp().unsqueeze(2)
    else:
        raise TaskError(f"survival curves need the task Cox or DiscreteHazards, and it is {task.kind}")
    asked = knots if times is None else torch.as_tensor(times).double()
    curves = at(log_survival, knots, asked).exp()
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    lower, upper = torch.quantile(curves, ends, dim=0)
    return SurvivalCurves(asked, curves.mean(0), lower, upper, level)


def baseline_hazard(task: Task, belief: Belief, strata: Sequence[Dataset]) -> tuple[Tensor, Tensor]:
    """(event times, cumulative baseline hazard after each), of the mean weights and inputs 0, by Breslow's estimator
    over the patients of `strata` together."""
    if not isinstance(task.likelihood, PartialLikelihood):
        raise TaskError(f"a baseline hazard belongs to the task Cox, and it is {task.kind}")
    sums = _sums(task, belief, strata, 0, 0)
    return sums.times, sums.cumulative()[0]


def _sums(task: Task, belief: Belief, strata: Sequence[Dataset], samples: int, seed: int) -> HazardSums:
    """The sums of all strata: the times of events are agreed first, then each stratum adds its own."""
    times = event_times([part.y.cpu() for part in strata])
    each = [HazardSums.of(_draws(task, belief, part, samples, seed), part.y.cpu(), times) for part in strata]
    return reduce(add, each)


def _draws(task: Task, belief: Belief, data: Dataset, samples: int, seed: int) -> Tensor:
    """The prediction of each network for all examples [M, N, ...]."""
    inputs = data.inputs(torch.arange(len(data), device=data.device), task.dtype)
    found: Tensor = predict_each(task, networks_of(task, belief, samples, seed=seed), inputs).cpu()
    return found


QUARTILES = {"low risk (first quartile)": 0.25, "median risk": 0.5, "high risk (third quartile)": 0.75}
POINTS = 80  # of a stored curve


def profiles(
    task: Task, belief: Belief, test: Dataset | Federation, strata: Sequence[Dataset]
) -> dict[str, Any] | None:
    """Curves of the test patients at the quartiles of risk, as in evaluation.json; None if the task has none."""
    data = test.data[test.order.to(test.data.device)] if isinstance(test, Federation) else test
    if not isinstance(task.likelihood, Hazards | PartialLikelihood) or not any(_events(part) for part in strata):
        return None
    order = _risk(task, belief, data).argsort()
    chosen = [int(order[round(share * (len(order) - 1))]) for share in QUARTILES.values()]
    times = _grid(task, strata)
    found = survival_curves(task, belief, strata, data[chosen].x, times=times)
    curves = zip(QUARTILES, found.mean.tolist(), found.lower.tolist(), found.upper.tolist(), strict=True)
    return {
        "times": times.tolist(),
        "level": found.level,
        "curves": [{"name": name, "mean": m, "lower": low, "upper": high} for name, m, low, high in curves],
    }


def _grid(task: Task, strata: Sequence[Dataset]) -> Tensor:
    """0 and the steps of a curve, or `POINTS` of them, as dense as the events are."""
    likelihood = task.likelihood
    knots = likelihood.ends.cpu().double() if isinstance(likelihood, Hazards) else event_times([p.y for p in strata])
    chosen = torch.linspace(0, len(knots) - 1, min(POINTS, len(knots))).round().long()
    return torch.nn.functional.pad(knots.cpu()[chosen], (1, 0))


def _events(data: Dataset) -> bool:
    return bool((data.y[:, 1] > 0).any())


def _risk(task: Task, belief: Belief, data: Dataset) -> Tensor:
    """A number for each example that is higher the earlier its event is expected."""
    found = _draws(task, belief, data, 0, 0)[0]
    return found if found.dim() == 1 else -found.sum(-1)
