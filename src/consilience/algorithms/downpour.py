"""Downpour SGD: a server that steps along every client's gradients in turn (Dean et al., 2012)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.shared.averaging import Server as Averaged
from consilience.algorithms.shared.averaging import continued
from consilience.core.records import Point
from consilience.data.cohort import Cohort, Info
from consilience.optim import AMSGrad, Chain
from consilience.server.optimizers import Adam, ServerOptimizer
from consilience.tasks.task import Task


@algorithm
class Downpour(Algorithm):
    """Clients train from w and send the sum of the gradients that they met; the server takes one step of its optimiser
    for each of them, in the order of clients. One epoch a round is the federated form."""

    additive: ClassVar[bool] = False
    train: Chain = AMSGrad(lr=0.01, epochs=1, batch_size=32, weight_decay=1e-6)
    server: ServerOptimizer = Adam(lr=0.01, eps=1e-8)

    def start(self, task: Task, info: Info) -> Averaged:
        """The module's own weights."""
        return continued(info, self.server)

    def message(self, server: Averaged, ids: object) -> Point:
        """The global weights."""
        return server.model

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Point, None]:
        """Train on, and add up what was met on the way."""
        plain = task.gradient()
        total = torch.zeros(len(cohort), len(message.theta), dtype=message.theta.dtype, device=message.theta.device)

        def counted(theta: Tensor, *own: Any, shared: tuple[Any, ...] = ()) -> tuple[Tensor, Tensor]:
            slope, loss = plain(theta, *own, shared=shared)
            total[: len(slope)] += slope
            return slope, loss

        for _ in self.train.iterates(counted, message.theta, cohort, pace=task.pace):
            pass
        return Point(total), None

    def fuse(self, server: Averaged, update: Point) -> Averaged:
        """One step a client."""
        for gradient in update.theta:
            server = Averaged(*self.server.step(server.model, Point(-gradient), server.memory))
        return server

    def posterior(self, server: Averaged) -> Point:
        """A point."""
        return server.model
