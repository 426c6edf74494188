"""SCAFFOLD: control variates that take out what sets a client's gradient apart (Karimireddy et al., 2020)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.fedavg import Averaged, continued
from consilience.algorithms.shared.corrections import Steered, apart, change_of_control, exchanged, need_plain_steps
from consilience.core.errors import check_word
from consilience.core.gaussian import Gaussian
from consilience.core.records import Point, Weighted, record
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGD, Chain
from consilience.server.optimizers import Momentum, ServerOptimizer
from consilience.tasks.task import Task

Variate = Literal["path", "gradient"]


@record
class Control:
    """A client's control variate c_k: its mean gradient when it last took part."""

    c: Tensor


@record
class Scaffold:
    """FedAvg's state, the mean c of all c_k, and the number K of clients."""

    averaged: Averaged
    c: Tensor
    clients: Tensor


@algorithm
class SCAFFOLD(Algorithm):
    """w_k ← w_k − lr (∇f_k(w_k) − c_k + c), from w; w ← w + optimiser(mean of w_k − w), c ← c + Σ (change of c_k)/K.
    All c begin at 0. The new c_k is, by `variate`,

    - "path": c_k − c + (w − w_k)/T, T the sum of the step sizes (option II of the paper): the mean gradient on the way,
      if steps are plain, so momentum is refused;
    - "gradient": ∇f_k(w) (option I), for one more pass over the data, and with any chain.

    The mean over a round's clients is uniform, so the objective is the mean of their losses, whatever their sizes.
    The paper's η_g is the server's lr.
    """

    train: Chain = SGD()
    server: ServerOptimizer = Momentum()
    variate: Variate = "path"

    def __post_init__(self) -> None:
        check_word("variate", self.variate, get_args(Variate))
        if self.variate == "path":
            need_plain_steps(self.train, self.name)

    def start(self, task: Task, info: Info) -> Scaffold:
        """The module's own weights, and c = 0."""
        w = info.initial
        return Scaffold(continued(info, self.server), torch.zeros_like(w), info.clients.to(w).view(1))

    def client(self, task: Task, info: Info, n: Tensor) -> Control:
        """c_k = 0."""
        return Control(info.initial.new_zeros(len(n), len(info.initial)))

    def message(self, server: Scaffold, ids: object) -> Steered:
        """w and c."""
        return Steered(server.averaged.model, server.c)

    def local(self, task: Task, message: Steered, state: Control, cohort: Cohort) -> tuple[Weighted, Control]:
        """Train from w with the correction c − c_k; send what changed."""
        w, c = message.model.theta, message.c
        correction = Gaussian(state.c - c, w.new_zeros(1))
        delta = self.train(task.gradient(), w, cohort, prior=correction).sub_(w)
        if self.variate == "gradient":
            everywhere = w.expand(len(cohort), -1)
            change = cohort.mean(task.gradient(), everywhere, self.train.batch_size) - state.c
        else:
            change = change_of_control(c, delta, self.train.time(cohort, task.pace))
        update = Weighted(Steered(Point(delta), change), torch.ones_like(cohort.n))
        return update, self.follow(state, update)

    def follow(self, state: Control, update: Weighted) -> Control:
        """The change of c_k is part of the update."""
        return Control(state.c + update.total.c)

    def swap(self, server: Scaffold, old: Control, new: Control) -> Scaffold:
        """c stays the mean of all c_k."""
        return Scaffold(server.averaged, exchanged(server.c, old.c, new.c, server.clients), server.clients)

    def fuse(self, server: Scaffold, update: Weighted) -> Scaffold:
        """A server step along the mean change; c stays the mean of all c_k."""
        model, memory = self.server.step(server.averaged.model, update.mean.model, server.averaged.memory)
        return Scaffold(Averaged(model, memory), server.c + update.total.c / server.clients, server.clients)

    def posterior(self, server: Scaffold) -> Point:
        """A point."""
        return server.averaged.model

    def audit(self, server: Scaffold, states: Iterable[Control]) -> dict[str, float]:
        """c is the mean of all c_k."""
        return {"c_apart_from_clients": apart("c", server.c, (group.c for group in states))}
