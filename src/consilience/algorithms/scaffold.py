"""SCAFFOLD: control variates correct the drift of a client's gradient (Karimireddy et al., 2020)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared import averaging
from consilience.algorithms.shared.averaging import Averaging, change
from consilience.algorithms.shared.corrections import (
    change_of_control,
    exchanged,
    gap_to_mean,
    need_plain_steps,
)
from consilience.core import Gaussian, Weighted, record
from consilience.data.cohort import Cohort, Info
from consilience.tasks.task import Task


@record
class Server(averaging.Server):
    """The mean c of all control variates, and the number K of clients."""

    c: Tensor
    clients: Tensor


@record
class Message:
    """The global weights w and the mean control variate c."""

    w: Tensor
    c: Tensor


@record
class Update:
    """The changes of w and of c_k."""

    w: Weighted
    c: Tensor


@record
class Client:
    """The control variate c_k: the client's mean gradient when it last took part."""

    c: Tensor


@algorithm
class SCAFFOLD(Averaging):
    """w_k ← w_k − lr (∇f_k(w_k) − c_k + c), from w; w ← w + optimiser(mean of w_k − w), c ← c + Σ (change of c_k)/K.

    All c start at 0. `variate` is the new c_k. "path" (the paper's option II) is c_k − c + (w − w_k)/T, with T the sum
    of the step sizes: the mean gradient of plain steps, so momentum is refused. "gradient" (option I) is ∇f_k(w), for
    one more pass over the data, and with any optimiser. The mean over clients is uniform. The paper's η_g is the
    server's lr."""

    by_gradients: ClassVar[bool] = True
    variate: Literal["path", "gradient"] = "path"

    def __post_init__(self) -> None:
        if self.variate == "path":
            need_plain_steps(self.train, self.name)

    def start(self, task: Task, info: Info) -> Server:
        base, w = super().start(task, info), info.initial
        return Server(base.model, base.memory, torch.zeros_like(w), info.clients.to(w).view(1))

    def client(self, task: Task, info: Info, n: Tensor) -> Client:
        return Client(info.initial.new_zeros(len(n), len(info.initial)))

    def message(self, server: Server, ids: Tensor) -> Message:
        return Message(server.model.theta, server.c)

    def local(self, task: Task, message: Message, state: Client, cohort: Cohort) -> tuple[Update, Client]:
        w, c = message.w, message.c
        trained = self.train(task, w, cohort, prior=Gaussian(state.c - c, w.new_zeros(1)))
        change_of_c = change_of_control(c, trained - w, self.train.time(cohort, task.pace))
        if self.variate == "gradient":
            change_of_c = cohort.mean(task.gradient(), w.expand(len(cohort), -1), self.train.batch_size) - state.c
        update = Update(change(trained, w, torch.ones_like(cohort.n)), change_of_c)
        return update, self.follow(state, update)

    def follow(self, state: Client, update: Update) -> Client:
        return Client(state.c + update.c)

    def swap(self, server: Server, old: Client, new: Client) -> Server:
        return replace(server, c=exchanged(server.c, old.c, new.c, server.clients))

    def fuse(self, server: Server, update: Update) -> Server:
        moved: Server = super().fuse(server, update.w)
        return replace(moved, c=server.c + update.c / server.clients)

    def audit(self, server: Server, states: Iterable[Client]) -> dict[str, float]:
        return {"c_apart_from_clients": gap_to_mean("c", server.c, (group.c for group in states))}
