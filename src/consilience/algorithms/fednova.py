"""FedNova: clients' changes are divided by their numbers of steps (Wang et al., 2020)."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.averaging import Averaging, Server
from consilience.core import ConfigError, Point, Weighted, guards, record
from consilience.data.cohort import Cohort
from consilience.optim import SGD
from consilience.tasks.task import Task


@record
class Update:
    """The change of the weights per step (w_k − w)/τ_k, with τ_k and 1/τ_k."""

    change: Point
    steps: Tensor
    inverse: Tensor


@algorithm
class FedNova(Averaging):
    """w ← w + optimiser((Σ p_k τ_k) Σ p_k (w_k − w)/τ_k), p_k = n_k / Σ n over the round's clients; w_k as in FedAvg.

    With τ_k short local steps FedAvg descends Σ p_k τ_k f_k, and FedNova Σ p_k f_k. If all τ are equal it is FedAvg.
    With momentum ρ, gradients act on later steps too, and τ becomes [τ − ρ(1 − ρ^τ)/(1 − ρ)]/(1 − ρ). With a schedule,
    steps count by size.

    The weights (Σ p τ) p_k/τ_k add up to more than 1: with very unequal clients the server steps far beyond all of
    them, and may diverge. `reach` limits their sum, and guards count it. The direction and the fixed point stay the
    same. The paper has no limit: inf."""

    by_gradients: ClassVar[bool] = True
    train: SGD = SGD()
    reach: Annotated[float, Field(ge=1)] = 2.0

    def __post_init__(self) -> None:
        schedule = self.train.schedule
        if self.train.momentum and schedule is not None and schedule.unit != "rounds":
            raise ConfigError(
                "with momentum, FedNova needs steps of one size within a round: the unit of the schedule must be "
                f"rounds, got {schedule.unit}"
            )

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        delta = self.train(task, message.theta, cohort).sub_(message.theta)
        tau = self.effective_steps(cohort)
        inverse = torch.where(tau > 0, 1 / tau, 0)  # a client whose steps all had size 0 has not moved
        return Weighted.of(Update(Point(delta.mul_(inverse)), tau, inverse), cohort.n), None

    def effective_steps(self, cohort: Cohort) -> Tensor:
        """τ_k [K, 1] times the mean size of a client's steps. Only ratios matter."""
        steps, rho = self.train.steps(cohort), self.train.momentum
        carried = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        return carried * self.train.time(cohort) / steps

    def fuse(self, server: Server, update: Weighted) -> Server:
        mean = update.mean
        most = self.reach / mean.inverse
        guards.count("reach held", mean.steps > most)
        change = Point(mean.steps.minimum(most) * mean.change.theta)
        return Server(*self.server.step(server.model, change, server.memory))
