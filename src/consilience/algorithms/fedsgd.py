"""FedSGD: one gradient a client a round; the baseline that every local method must beat per round."""

from __future__ import annotations

from typing import ClassVar

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.shared.averaging import Server as Averaged
from consilience.algorithms.shared.averaging import continued
from consilience.core.ranges import Range, Ranges
from consilience.core.records import Point, Weighted
from consilience.data.cohort import Cohort, Info
from consilience.server.optimizers import Momentum, ServerOptimizer
from consilience.tasks.task import Task


@algorithm
class FedSGD(Algorithm):
    """w ← w − η Σ p_k ∇f_k(w): gradient descent on the pooled loss, the gradient computed where the data is.
    `batch` is only how many examples are in memory at once; it does not change the result."""

    ranges: ClassVar[Ranges] = {"server.lr": Range(1e-3, 1.0)}  # of gradients, not of clients' whole ways
    server: ServerOptimizer = Momentum(lr=0.1)
    batch_size: int = 256

    def start(self, task: Task, info: Info) -> Averaged:
        """Everyone begins with the module's own weights."""
        return continued(info, self.server)

    def message(self, server: Averaged, ids: object) -> Point:
        """The global weights."""
        return server.model

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        """Send −n_k ∇f_k(w), over all of the client's examples."""
        theta = message.theta.expand(len(cohort), -1)
        return Weighted.of(Point(-cohort.mean(task.gradient(), theta, self.batch_size)), cohort.n), None

    def fuse(self, server: Averaged, update: Weighted) -> Averaged:
        """A server step down the mean gradient."""
        return Averaged(*self.server.step(server.model, update.mean, server.memory))

    def posterior(self, server: Averaged) -> Point:
        """A point."""
        return server.model
