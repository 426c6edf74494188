"""FedDC: clients keep track of their drift, and the server makes up for it (Gao et al., 2022)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.shared.corrections import change_of_control, exchanged, gap_to_mean, need_plain_steps
from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.core.ranges import Range, Ranges
from consilience.core.records import Point, Weighted, add, record, tree_map
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGD
from consilience.tasks.task import Task


@record
class Drift:
    """A client's drift h_k and control variate c_k; their changes; or the means of all clients'."""

    h: Tensor
    c: Tensor


@record
class Steered:
    """w and c."""

    model: Point
    c: Tensor


@record
class Decoupled:
    """The global weights, the means of all h_k and c_k, and the number K of clients."""

    model: Point
    mean: Drift
    clients: Tensor


@algorithm
class FedDC(Algorithm):
    """Clients minimise loss + α/2 ‖w_k + h_k − w‖² + ⟨c − c_k, w_k⟩, from w; h_k ← h_k + w_k − w, and
    c_k ← c_k − c + (w − w_k)/T, T the sum of the step sizes. w ← mean of w_k over the round's clients + h, with h and c
    the means of h_k and c_k over all clients. All begin at 0; means are uniform, without the authors' weights n_k.

    c_k is a mean slope only if steps are plain: momentum is refused. h is a velocity that only the leash brakes, as in
    FedDyn: a small α needs much local training.
    """

    ranges: ClassVar[Ranges] = {"alpha": Range(1e-2, 1.0)}
    train: SGD = SGD()
    alpha: float = 0.1

    def __post_init__(self) -> None:
        need_plain_steps(self.train, self.name)
        lr = self.train.lr
        if not (self.alpha > 0 and lr * self.alpha <= 1):  # else the chain shortens steps, and T would be wrong
            raise ConfigError(f"alpha must be positive and lr · alpha at most 1, got alpha={self.alpha} and lr={lr}")

    def start(self, task: Task, info: Info) -> Decoupled:
        """The module's own weights, no drift."""
        w = info.initial
        return Decoupled(Point(w), Drift(torch.zeros_like(w), torch.zeros_like(w)), info.clients.to(w).view(1))

    def client(self, task: Task, info: Info, n: Tensor) -> Drift:
        """No drift."""
        shape = (len(n), len(info.initial))
        return Drift(info.initial.new_zeros(shape), info.initial.new_zeros(shape))

    def message(self, server: Decoupled, ids: object) -> Steered:
        """w and c."""
        return Steered(server.model, server.mean.c)

    def local(self, task: Task, message: Steered, state: Drift, cohort: Cohort) -> tuple[Weighted, Drift]:
        """Train from w, leashed to w − h_k; send what changed."""
        w, c = message.model.theta, message.c
        pull = Gaussian(self.alpha * (w - state.h) + state.c - c, w.new_full((1,), self.alpha))
        delta = self.train(task, w, cohort, prior=pull).sub_(w)
        change = Drift(delta, change_of_control(c, delta, self.train.time(cohort, task.pace)))
        update = Weighted(change, torch.ones_like(cohort.n))
        return update, self.follow(state, update)

    def follow(self, state: Drift, update: Weighted) -> Drift:
        """The changes of h_k and c_k are the update."""
        drift: Drift = add(state, update.total)
        return drift

    def swap(self, server: Decoupled, old: Drift, new: Drift) -> Decoupled:
        """h and c stay the means of all h_k and c_k."""
        return Decoupled(server.model, exchanged(server.mean, old, new, server.clients), server.clients)

    def fuse(self, server: Decoupled, update: Weighted) -> Decoupled:
        """The mean of the round's clients, and the mean drift of all."""
        mean = tree_map(lambda old, change: old + change / server.clients, server.mean, update.total)
        return Decoupled(Point(server.model.theta + update.mean.h + mean.h), mean, server.clients)

    def posterior(self, server: Decoupled) -> Point:
        """A point."""
        return server.model

    def audit(self, server: Decoupled, states: Iterable[Drift]) -> dict[str, float]:
        """h and c are the means of all h_k and c_k."""
        gap = gap_to_mean("drift", _joined(server.mean), (_joined(group) for group in states))
        return {"drift_apart_from_clients": gap}


def _joined(drift: Drift) -> Tensor:
    return torch.cat([drift.h, drift.c], dim=-1)
