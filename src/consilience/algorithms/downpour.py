"""Downpour SGD: a server that steps along every client's gradients in turn (Dean et al., 2012)."""

from typing import Any, ClassVar

from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.averaging import Averaging, Server
from consilience.core.records import Point
from consilience.data.cohort import Cohort
from consilience.optim import AMSGrad, Chain
from consilience.server.optimizers import Adam, ServerOptimizer
from consilience.tasks.task import Task


@algorithm
class Downpour(Averaging):
    """Clients train from w and send the sum of the gradients of their steps. The server takes one step of its optimiser
    for each client, in the order of clients. One epoch a round is the federated form."""

    additive: ClassVar[bool] = False
    train: Chain = AMSGrad(lr=0.01, epochs=1, batch_size=32, weight_decay=1e-6)
    server: ServerOptimizer = Adam(lr=0.01, eps=1e-8)

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Point, None]:
        plain = self.train.gradient(task)
        total = message.theta.new_zeros(len(cohort), len(message.theta))

        def counted(theta: Tensor, *own: Any, shared: tuple[Any, ...] = ()) -> tuple[Tensor, Tensor]:
            gradient, loss = plain(theta, *own, shared=shared)
            total[: len(gradient)] += gradient
            return gradient, loss

        for _ in self.train.iterates(counted, message.theta, cohort, pace=task.pace, running=task.running):
            pass
        return Point(total), None

    def fuse(self, server: Server, update: Point) -> Server:
        for gradient in update.theta:
            server = Server(*self.server.step(server.model, Point(-gradient), server.memory))
        return server
