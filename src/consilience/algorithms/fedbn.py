"""FedBN: the layers with statistics of a batch stay at the clients (Li et al., 2021)."""

from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared import averaging
from consilience.algorithms.shared.averaging import Averaging
from consilience.core import Point, TaskError, Weighted, record
from consilience.data import Cohort, Info
from consilience.tasks.task import Task


@record
class Server(averaging.Server):
    """FedAvg's state, and the places in θ that stay at the clients [own]."""

    places: Tensor


@record
class Client:
    """The client's own entries of θ [K, own]: scales, shifts and running averages of its BatchNorm layers."""

    own: Tensor


@algorithm
class FedBN(Averaging):
    """FedAvg on all weights but those of BatchNorm layers, whose scale, shift and statistics stay at the client.

    Every client predicts with its own norm layers, so the clients' models are tested, and not one of the server."""

    alone: ClassVar[bool] = True

    def adapt(self, task: Task, seed: int) -> Task:
        if not task.layout.main.batchnorms:
            raise TaskError("FedBN keeps BatchNorm layers at the clients, and the module has none: use FedAvg")
        return task.averaging()

    def start(self, task: Task, info: Info) -> Server:
        base = super().start(task, info)
        return Server(base.model, base.memory, _places(task))

    def client(self, task: Task, info: Info, n: Tensor) -> Client:
        return Client(info.initial[_places(task)].repeat(len(n), 1))

    def local(self, task: Task, message: Point, state: Client, cohort: Cohort) -> tuple[Weighted, Client]:
        places = _places(task)
        start = message.theta.repeat(len(cohort), 1).index_copy_(1, places, state.own)
        change = self.train(task, start, cohort) - start
        own = state.own + change[:, places]
        return Weighted.of(Point(change.index_fill_(1, places, 0.0)), cohort.n), Client(own)

    def personal(self, server: Server, state: Client) -> Point:
        return Point(server.model.theta.index_copy(0, server.places, state.own))


def _places(task: Task) -> Tensor:
    """The places in θ of all entries of BatchNorm layers, [own]."""
    norms = tuple(f"{name}." if name else "" for name in task.main.batchnorms)
    found = [task.slice(parameter=name) for name in task.main.names if name.startswith(norms)]
    return torch.cat([torch.arange(place.start, place.stop) for place in found]).to(task.device)
