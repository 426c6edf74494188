"""FedDC: clients keep track of their drift, and the server corrects for it (Gao et al., 2022)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.averaging import OneModel
from consilience.algorithms.shared.corrections import (
    change_of_control,
    exchanged,
    gap_to_mean,
    need_plain_steps,
)
from consilience.core import ConfigError, Gaussian, Positive, Range, Ranges
from consilience.core.records import Point, Weighted, add, record, tree_map
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGD
from consilience.tasks.task import Task


@record
class Server:
    """The global weights, the means of all h_k and c_k, and the number K of clients."""

    model: Point
    mean: Client
    clients: Tensor


@record
class Message:
    """The global weights w and the mean control variate c."""

    w: Tensor
    c: Tensor


@record
class Update:
    """The changes of h_k (which is the change of w) and of c_k."""

    h: Tensor
    c: Tensor


@record
class Client:
    """The drift h_k and the control variate c_k."""

    h: Tensor
    c: Tensor


@algorithm
class FedDC(OneModel):
    """Clients minimise loss + α/2 ‖w_k + h_k − w‖² + ⟨c − c_k, w_k⟩, from w; h_k ← h_k + w_k − w, and
    c_k ← c_k − c + (w − w_k)/T, T the sum of the step sizes. w ← mean of w_k over the round's clients + h, with h and c
    the means of h_k and c_k over all clients. All start at 0; means are uniform, without the authors' weights n_k.

    c_k is a mean gradient only if steps are plain: momentum is refused. h is a velocity that only the proximal term
    damps, as in FedDyn: a small α needs much local training."""

    by_gradients: ClassVar[bool] = True
    ranges: ClassVar[Ranges] = {"alpha": Range(1e-2, 1.0)}
    train: SGD = SGD()
    alpha: Positive = 0.1

    def __post_init__(self) -> None:
        need_plain_steps(self.train, self.name)
        if self.train.lr * self.alpha > 1:  # else the chain shortens steps, and T would be wrong
            raise ConfigError(f"lr · alpha must be at most 1, got lr={self.train.lr} and alpha={self.alpha}")

    def start(self, task: Task, info: Info) -> Server:
        w = info.initial
        return Server(Point(w), Client(torch.zeros_like(w), torch.zeros_like(w)), info.clients.to(w).view(1))

    def client(self, task: Task, info: Info, n: Tensor) -> Client:
        shape = (len(n), len(info.initial))
        return Client(info.initial.new_zeros(shape), info.initial.new_zeros(shape))

    def message(self, server: Server, ids: Tensor) -> Message:
        return Message(server.model.theta, server.mean.c)

    def local(self, task: Task, message: Message, state: Client, cohort: Cohort) -> tuple[Weighted, Client]:
        w, c = message.w, message.c
        proximal = Gaussian(self.alpha * (w - state.h) + state.c - c, w.new_full((1,), self.alpha))
        delta = self.train(task, w, cohort, prior=proximal).sub_(w)
        changes = Update(delta, change_of_control(c, delta, self.train.time(cohort, task.pace)))
        update = Weighted(changes, torch.ones_like(cohort.n))
        return update, self.follow(state, update)

    def follow(self, state: Client, update: Weighted) -> Client:
        client: Client = add(state, update.total)
        return client

    def swap(self, server: Server, old: Client, new: Client) -> Server:
        return replace(server, mean=exchanged(server.mean, old, new, server.clients))

    def fuse(self, server: Server, update: Weighted) -> Server:
        mean = tree_map(lambda old, change: old + change / server.clients, server.mean, update.total)
        return replace(server, model=Point(server.model.theta + update.mean.h + mean.h), mean=mean)

    def audit(self, server: Server, states: Iterable[Client]) -> dict[str, float]:
        gap = gap_to_mean("drift", _joined(server.mean), (_joined(group) for group in states))
        return {"drift_apart_from_clients": gap}


def _joined(client: Client) -> Tensor:
    return torch.cat([client.h, client.c], dim=-1)
