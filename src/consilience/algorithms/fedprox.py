"""FedProx: FedAvg on a leash (Li et al., 2020)."""

from __future__ import annotations

from consilience.algorithms.base import Algorithm, algorithm
from consilience.cohort import Cohort, Info
from consilience.errors import ConfigError
from consilience.gaussian import Gaussian
from consilience.inference import SGD
from consilience.records import Point, Weighted
from consilience.task import Task


@algorithm
class FedProx(Algorithm):
    """Clients minimise loss + μ/2 ‖w_k − w‖²: a Gaussian prior of precision μ around the global weights.
    The server averages as in FedAvg; μ = 0 is FedAvg."""

    train: SGD = SGD()
    mu: float = 0.1

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise ConfigError(f"mu must not be negative, got {self.mu}")

    def start(self, task: Task, info: Info) -> Point:
        """Everyone begins with the module's own weights."""
        return Point(info.initial)

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        """Train from w with the leash; send n_k (w_k − w)."""
        w = message.theta
        leash = Gaussian.of(w, w.new_full((1,), self.mu))
        delta = self.train(task.gradient(), w, cohort, prior=leash).sub_(w)
        return Weighted(Point(delta.mul_(cohort.n)), cohort.n), None

    def fuse(self, server: Point, update: Weighted) -> Point:
        """w + Σ p_k (w_k − w)."""
        return Point(server.theta + update.mean.theta)

    def posterior(self, server: Point) -> Point:
        """A point."""
        return server
