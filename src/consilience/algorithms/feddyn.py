"""FedDyn: clients' objectives change so that their optima agree (Acar et al., 2021)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.averaging import OneModel, change
from consilience.algorithms.shared.corrections import exchanged, gap_to_mean
from consilience.core import Gaussian, Point, Positive, Range, Ranges, Weighted, record
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGD, Chain
from consilience.tasks.task import Task


@record
class Server:
    """The global weights, the mean h of all h_k, and the number K of clients."""

    model: Point
    h: Tensor
    clients: Tensor


@record
class Client:
    """h_k: the gradient of the client's loss where it last stopped."""

    h: Tensor


@algorithm
class FedDyn(OneModel):
    """Clients minimise loss − ⟨h_k, w_k⟩ + α/2 ‖w_k − w‖², from w; h_k ← h_k − α (w_k − w).
    h ← h − α Σ (w_k − w)/K, w ← mean of w_k − h/α, uniform over the round's clients. All h start at 0.

    At the fixed point h_k = ∇f_k(w) and h = 0: the minimum of the mean of the clients' losses. −h/α is the sum of all
    mean changes so far, for every α: a velocity that only the proximal term damps, the less the shorter clients train.
    So α → 0 is not FedAvg, and a small α needs much local training."""

    by_gradients: ClassVar[bool] = True
    ranges: ClassVar[Ranges] = {"alpha": Range(1e-2, 1.0)}
    train: Chain = SGD()
    alpha: Positive = 0.1

    def start(self, task: Task, info: Info) -> Server:
        w = info.initial
        return Server(Point(w), torch.zeros_like(w), info.clients.to(w).view(1))

    def client(self, task: Task, info: Info, n: Tensor) -> Client:
        return Client(info.initial.new_zeros(len(n), len(info.initial)))

    def local(self, task: Task, message: Point, state: Client, cohort: Cohort) -> tuple[Weighted, Client]:
        w = message.theta
        regulariser = Gaussian(self.alpha * w + state.h, w.new_full((1,), self.alpha))
        update = change(self.train(task, w, cohort, prior=regulariser), w, torch.ones_like(cohort.n))
        return update, self.follow(state, update)

    def follow(self, state: Client, update: Weighted) -> Client:
        return Client(state.h - self.alpha * update.total.theta)

    def swap(self, server: Server, old: Client, new: Client) -> Server:
        return replace(server, h=exchanged(server.h, old.h, new.h, server.clients))

    def fuse(self, server: Server, update: Weighted) -> Server:
        h = server.h - self.alpha * update.total.theta / server.clients
        return replace(server, model=Point(server.model.theta + update.mean.theta - h / self.alpha), h=h)

    def audit(self, server: Server, states: Iterable[Client]) -> dict[str, float]:
        return {"h_apart_from_clients": gap_to_mean("h", server.h, (group.h for group in states))}
