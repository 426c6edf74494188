"""Averaging: the server steps along the weighted mean of the clients' changes."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.core.records import Point, Weighted, record
from consilience.data.cohort import Info
from consilience.optim import SGD, Chain
from consilience.server.optimizers import Moments, Momentum, ServerOptimizer, carry_over
from consilience.tasks.task import Task


@record
class Server:
    """The global weights and the server optimiser's memory."""

    model: Point
    memory: Moments


class OneModel(Algorithm):
    """The server's state has a `model`: clients receive it, and it is the posterior."""

    def message(self, server: Any, ids: Tensor) -> Any:
        return server.model

    def posterior(self, server: Any) -> Point:
        model: Point = server.model
        return model


@algorithm
class Averaging(OneModel):
    """w ← w + optimiser(Σ p_k (w_k − w)), with p_k proportional to the weights that clients send.

    Subclasses define `local`, which returns `change(w_k, w, weight)`. Other records extend `Server`."""

    train: Chain = SGD()
    server: ServerOptimizer = Momentum()

    def start(self, task: Task, info: Info) -> Server:
        return continued(info, self.server)

    def fuse(self, server: Any, update: Any) -> Any:
        model, memory = self.server.step(server.model, update.mean, server.memory)
        return replace(server, model=model, memory=memory)


def change(trained: Tensor, w: Tensor, weight: Tensor) -> Weighted:
    """weight · (w_k − w) with its weight [K, 1]. `trained` [K, P] is overwritten."""
    if trained.is_cuda and trained.is_contiguous() and w.dim() == 1 and trained.dtype == w.dtype == weight.dtype:
        from consilience.compute.kernels.change import weighted_change  # Triton comes with torch for GPUs only

        return Weighted(Point(weighted_change(trained, w, weight)), weight)
    return Weighted(Point(trained.sub_(w).mul_(weight)), weight)


def continued(info: Info, optimizer: ServerOptimizer) -> Server:
    """The initial weights and the optimiser's memory, which is taken from the previous method of a Switch."""
    model = Point(info.initial)
    memory = optimizer.start(model)
    if isinstance(info.before, Server):
        memory = carry_over(info.before.memory, memory)
    return Server(model, memory)
