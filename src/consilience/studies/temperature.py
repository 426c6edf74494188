"""fit_temperature: how wide a posterior should be, by held-out examples of the clients."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.data import Dataset, Federation
from consilience.evaluation.predictions import SAMPLES
from consilience.evaluation.tallies import tallied
from consilience.runs import Run

log = logging.getLogger("consilience")
GRID = tuple(2.0**k for k in range(-10, 4))


@dataclass(frozen=True, eq=False)
class Tempered:
    """The `belief` q^(1/T), which has q's mean and T times its variances, at the `temperature` T of a grid whose
    marginal predictions have the lowest NLL; and the `nll` of all temperatures."""

    temperature: float
    belief: Gaussian
    nll: dict[float, float]


def fit_temperature(
    run: Run, data: Dataset | Federation, grid: Sequence[float] = GRID, *, samples: int = SAMPLES
) -> Tempered:
    """The temperature of a run's Gaussian posterior whose predictions of `data`, averaged over `samples` draws, have
    the lowest NLL. The examples must be held out: on those of training narrow posteriors win.

    An NLL is a sum over examples, so clients would send one number for each temperature. All temperatures have the same
    draws, scaled."""
    belief, task = run.posterior, run.network
    if not isinstance(belief, Gaussian):
        raise ConfigError(f"{run.algorithm.name} has no Gaussian posterior, whose width a temperature could change")
    if not grid or min(grid) <= 0:
        raise ConfigError(f"temperatures must be positive, and at least one, got {list(grid)}")
    examples = Federation.from_silos([data]) if isinstance(data, Dataset) else data
    examples = examples.to(task.device)
    nll = {}
    for temperature in sorted(grid):
        found = tallied(task, belief ** (1 / temperature), examples.data, examples.order, (), samples)
        scores = found.scores()
        if "nll" not in scores:
            raise ConfigError(f"a temperature is fitted by the NLL, which {task.kind} does not score")
        nll[temperature] = scores["nll"]
    best = min(nll, key=nll.__getitem__)
    if len(nll) > 1 and best in (min(nll), max(nll)):
        log.warning("the best temperature, %g, is at the end of the grid", best)
    return Tempered(best, belief ** (1 / best), nll)
