"""FedDyn: clients' objectives change so that their optima agree (Acar et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.shared.corrections import exchanged, gap_to_mean
from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.core.ranges import Range, Ranges
from consilience.core.records import Point, Weighted, record
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGD, Chain
from consilience.tasks.task import Task


@record
class Tilt:
    """A client's h_k: the gradient of its loss where it last stopped."""

    h: Tensor


@record
class Dynamic:
    """The global weights, the mean h of all h_k, and the number K of clients."""

    model: Point
    h: Tensor
    clients: Tensor


@algorithm
class FedDyn(Algorithm):
    """Clients minimise loss − ⟨h_k, w_k⟩ + α/2 ‖w_k − w‖², from w; h_k ← h_k − α (w_k − w).
    h ← h − α Σ (w_k − w)/K, w ← mean of w_k − h/α, uniform over the round's clients. All h begin at 0.

    Nobody moves where h_k = ∇f_k(w) and h = 0, which is the minimum of the mean of the clients' losses. −h/α is the sum
    of all mean changes so far, whatever α: a velocity that only the leash brakes, the less the shorter clients train.
    So α → 0 is not FedAvg, and a small α needs much local training.
    """

    ranges: ClassVar[Ranges] = {"alpha": Range(1e-2, 1.0)}
    train: Chain = SGD()
    alpha: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"alpha must be positive and finite, got {self.alpha}")

    def start(self, task: Task, info: Info) -> Dynamic:
        """The module's own weights, and h = 0."""
        return Dynamic(Point(info.initial), torch.zeros_like(info.initial), info.clients.to(info.initial).view(1))

    def client(self, task: Task, info: Info, n: Tensor) -> Tilt:
        """h_k = 0."""
        return Tilt(info.initial.new_zeros(len(n), len(info.initial)))

    def message(self, server: Dynamic, ids: object) -> Point:
        """The global weights."""
        return server.model

    def local(self, task: Task, message: Point, state: Tilt, cohort: Cohort) -> tuple[Weighted, Tilt]:
        """Train from w with the leash and the tilt; send w_k − w."""
        w = message.theta
        regulariser = Gaussian(self.alpha * w + state.h, w.new_full((1,), self.alpha))
        delta = self.train(task, w, cohort, prior=regulariser).sub_(w)
        update = Weighted(Point(delta), torch.ones_like(cohort.n))
        return update, self.follow(state, update)

    def follow(self, state: Tilt, update: Weighted) -> Tilt:
        """h_k − α (w_k − w)."""
        return Tilt(state.h - self.alpha * update.total.theta)

    def swap(self, server: Dynamic, old: Tilt, new: Tilt) -> Dynamic:
        """h stays the mean of all h_k."""
        return Dynamic(server.model, exchanged(server.h, old.h, new.h, server.clients), server.clients)

    def fuse(self, server: Dynamic, update: Weighted) -> Dynamic:
        """The mean, and a step against h."""
        h = server.h - self.alpha * update.total.theta / server.clients
        return Dynamic(Point(server.model.theta + update.mean.theta - h / self.alpha), h, server.clients)

    def posterior(self, server: Dynamic) -> Point:
        """A point."""
        return server.model

    def audit(self, server: Dynamic, states: Iterable[Tilt]) -> dict[str, float]:
        """h is the mean of all h_k."""
        return {"h_apart_from_clients": gap_to_mean("h", server.h, (group.h for group in states))}
