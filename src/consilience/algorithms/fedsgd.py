"""FedSGD: one gradient from each client a round."""

from dataclasses import replace
from typing import ClassVar

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.averaging import OneModel, Server, continued
from consilience.core import Count, Point, Range, Ranges, Weighted
from consilience.data.cohort import Cohort, Info
from consilience.server.optimizers import Momentum, ServerOptimizer
from consilience.tasks.task import Task


@algorithm
class FedSGD(OneModel):
    """w ← w − η Σ p_k ∇f_k(w): gradient descent on the pooled loss. `batch_size` limits the examples in memory; it does
    not change the result."""

    ranges: ClassVar[Ranges] = {"server.lr": Range(1e-3, 1.0)}  # of gradients, not of whole local trainings
    server: ServerOptimizer = Momentum(lr=0.1)
    batch_size: Count = 256

    def start(self, task: Task, info: Info) -> Server:
        return continued(info, self.server)

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        w = message.theta.expand(len(cohort), -1)
        return Weighted.of(Point(-cohort.mean(task.gradient(), w, self.batch_size)), cohort.n), None

    def fuse(self, server: Server, update: Weighted) -> Server:
        model, memory = self.server.step(server.model, update.mean, server.memory)
        return replace(server, model=model, memory=memory)
