"""FedProx: FedAvg on a leash (Li et al., 2020)."""

from __future__ import annotations

from typing import ClassVar

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.fedavg import Averaged, continued
from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.core.ranges import Range, Ranges
from consilience.core.records import Point, Weighted
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGD, Chain
from consilience.server.optimizers import Momentum, ServerOptimizer
from consilience.tasks.task import Task


@algorithm
class FedProx(Algorithm):
    """Clients minimise loss + μ/2 ‖w_k − w‖²: a Gaussian prior of precision μ around the global weights.
    The server is FedAvg's; μ = 0 is FedAvg."""

    ranges: ClassVar[Ranges] = {"mu": Range(1e-3, 1.0)}
    train: Chain = SGD()
    mu: float = 0.1
    server: ServerOptimizer = Momentum()

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise ConfigError(f"mu must not be negative, got {self.mu}")

    def start(self, task: Task, info: Info) -> Averaged:
        """Everyone begins with the module's own weights."""
        return continued(info, self.server)

    def message(self, server: Averaged, ids: object) -> Point:
        """The global weights."""
        return server.model

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        """Train from w with the leash; send n_k (w_k − w)."""
        w = message.theta
        leash = Gaussian.of(w, w.new_full((1,), self.mu))
        delta = self.train(task.gradient(), w, cohort, prior=leash).sub_(w)
        return Weighted(Point(delta.mul_(cohort.n)), cohort.n), None

    def fuse(self, server: Averaged, update: Weighted) -> Averaged:
        """A server step along the mean change."""
        return Averaged(*self.server.step(server.model, update.mean, server.memory))

    def posterior(self, server: Averaged) -> Point:
        """A point."""
        return server.model
