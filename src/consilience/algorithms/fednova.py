"""FedNova: changes count per step, so that clients with more steps do not count for more (Wang et al., 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.shared.averaging import Server as Averaged
from consilience.algorithms.shared.averaging import continued
from consilience.core import guards
from consilience.core.errors import ConfigError
from consilience.core.records import Point, Weighted, record
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGD
from consilience.server.optimizers import Momentum, ServerOptimizer
from consilience.tasks.task import Task


@record
class Normalised:
    """A change of the weights per step, (w_k − w)/τ_k; and τ_k, and 1/τ_k."""

    change: Point
    steps: Tensor
    inverse: Tensor


@algorithm
class FedNova(Algorithm):
    """w ← w + optimiser((Σ p_k τ_k) Σ p_k (w_k − w)/τ_k), p_k = n_k / Σ n over the round's clients; w_k as in FedAvg.

    With τ_k short local steps FedAvg descends Σ p_k τ_k f_k, and FedNova Σ p_k f_k. One τ for all clients is FedAvg.
    Momentum ρ carries gradients on, so τ becomes [τ − ρ(1 − ρ^τ)/(1 − ρ)]/(1 − ρ). A schedule's steps count by size.

    The weights (Σ p τ) p_k/τ_k add up to more than 1: with very unequal clients the server goes far beyond what any of
    them found, and may diverge. Their sum is held to `reach`, and that is counted: the direction stays, and so does
    where it ends. The paper has inf.
    """

    train: SGD = SGD()
    server: ServerOptimizer = Momentum()
    reach: float = 2.0

    def __post_init__(self) -> None:
        schedule = self.train.schedule
        if not self.reach >= 1:
            raise ConfigError(f"reach must be at least 1, got {self.reach}")
        if self.train.momentum and schedule is not None and schedule.unit != "rounds":
            raise ConfigError(
                "with momentum, FedNova needs steps of one size within a round: the unit of the schedule must be "
                f"rounds, got {schedule.unit}"
            )

    def start(self, task: Task, info: Info) -> Averaged:
        """Everyone begins with the module's own weights."""
        return continued(info, self.server)

    def message(self, server: Averaged, ids: object) -> Point:
        """The global weights."""
        return server.model

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        """Train from w; send n_k (w_k − w)/τ_k."""
        delta = self.train(task, message.theta, cohort).sub_(message.theta)
        tau = self.effective_steps(cohort)
        inverse = torch.where(tau > 0, 1 / tau, 0)  # who had only steps of size 0 has not moved
        return Weighted.of(Normalised(Point(delta.mul_(inverse)), tau, inverse), cohort.n), None

    def effective_steps(self, cohort: Cohort) -> Tensor:
        """τ_k [K, 1], how many steps a client's gradients are carried on for, times the mean size of its steps: only
        ratios matter."""
        steps, rho = self.train.steps(cohort), self.train.momentum
        carried = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        return carried * self.train.time(cohort) / steps

    def fuse(self, server: Averaged, update: Weighted) -> Averaged:
        """A server step along the mean change per step, for the mean number of steps."""
        mean = update.mean
        most = self.reach / mean.inverse
        guards.count("reach held", mean.steps > most)
        change = Point(mean.steps.minimum(most) * mean.change.theta)
        return Averaged(*self.server.step(server.model, change, server.memory))

    def posterior(self, server: Averaged) -> Point:
        """A point."""
        return server.model
