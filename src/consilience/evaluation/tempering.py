"""One temperature for a posterior, from the losses of held-out examples, which add up over clients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from consilience.core import Belief, DataError, Gaussian, TaskError
from consilience.core.checks import check_type
from consilience.data import Dataset, Federation
from consilience.evaluation.predictions import SAMPLES
from consilience.evaluation.tallies import tallied
from consilience.tasks import Supervised, Task

log = logging.getLogger("consilience")
GRID = tuple(10 ** (step / 4) for step in range(-12, 5))  # 0.001 to 10


@dataclass(frozen=True)
class Tempering:
    """The summed negative log-likelihoods `losses` of held-out examples, for predictions averaged over draws of
    q^(1/T) = N(μ, T Λ⁻¹) for each of `temperatures` T. Those of several clients add up."""

    temperatures: tuple[float, ...]
    losses: tuple[float, ...]
    examples: int

    def __add__(self, other: Tempering) -> Tempering:
        if self.temperatures != other.temperatures:
            raise DataError("losses add up for the same temperatures only")
        losses = tuple(mine + theirs for mine, theirs in zip(self.losses, other.losses, strict=True))
        return Tempering(self.temperatures, losses, self.examples + other.examples)

    @property
    def temperature(self) -> float:
        """The temperature with the lowest loss."""
        return min(zip(self.losses, self.temperatures, strict=True))[1]

    @property
    def nll(self) -> tuple[float, ...]:
        """The mean loss of an example for each temperature."""
        return tuple(loss / self.examples for loss in self.losses)

    def __call__(self, belief: Belief) -> Gaussian:
        """The belief q at this temperature."""
        return _gaussian(belief) ** (1 / self.temperature)


def temper(
    task: Task,
    belief: Belief | Callable[[int], Belief],
    data: Dataset | Federation,
    *,
    temperatures: Sequence[float] = GRID,
    samples: int = SAMPLES,
    batch_size: int | None = None,
) -> Tempering:
    """The losses of held-out examples at every temperature, summed over clients. `belief` may be a function of the
    client, as in `evaluate`. All temperatures have the same draws."""
    if not (isinstance(task, Supervised) and (task.likelihood.categorical or task.likelihood.gaussian)):
        raise TaskError(f"a temperature needs a negative log-likelihood of predictions, and the task is {task.kind}")
    if not temperatures or not all(temperature > 0 for temperature in temperatures):
        raise DataError(f"temperatures are positive numbers, got {list(temperatures)}")
    check_type("samples", samples, int)
    if samples < 1:
        raise DataError(f"samples must be at least 1, got {samples}")
    parts = [torch.arange(len(data))]
    if isinstance(data, Federation):
        parts = [data.indices(client) for client in range(len(data))]
    total: Tempering | None = None
    for client, rows in enumerate(parts):
        if len(rows):
            q = _gaussian(belief(client) if callable(belief) else belief)
            examples = data.data if isinstance(data, Federation) else data
            losses = [
                tallied(task, q ** (1 / t), examples, rows, (), samples, batch_size).scores()["nll"] * len(rows)
                for t in temperatures
            ]
            one = Tempering(tuple(temperatures), tuple(losses), len(rows))
            total = one if total is None else total + one
    if total is None:
        raise DataError("there are no held-out examples to find a temperature from")
    if len(temperatures) > 1 and total.temperature in (min(temperatures), max(temperatures)):
        log.warning("the best temperature, %g, is at the end of the grid", total.temperature)
    return total


def _gaussian(belief: Belief) -> Gaussian:
    if not isinstance(belief, Gaussian):
        raise TaskError(f"only a Gaussian posterior has a temperature, and the belief is a {type(belief).__name__}")
    return belief
