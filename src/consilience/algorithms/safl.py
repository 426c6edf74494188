"""SA-FL: federated learning as stochastic approximation, with steps that taper off."""

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.averaging import OneModel, change
from consilience.core.records import Point, Weighted, record
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGD, Chain, Tapered
from consilience.tasks.task import Task


@record
class Server:
    """The mean w̄ of the clients' weights, its average over the rounds so far, and their number."""

    model: Point
    average: Point | None
    rounds: Tensor


@algorithm
class SAFL(OneModel):
    """w_k ← w_k − a_n ∇f_k(w_k), N times, from the common w̄; then w̄ ← 1/L Σ w_k. With a_n = C/n^δ, ¾ < δ ≤ 1, w̄ follows
    ẇ = −1/L Σ ∇f_k(w), and where that is asymptotically stable it converges to an equilibrium with probability one.

    The mean over clients is uniform. With weights n_k (`by_examples`) the ODE is that of Σ p_k f_k. `average` takes the
    mean of w̄ over all rounds (Polyak & Ruppert)."""

    train: Chain = SGD(lr=0.1, epochs=5, batch_size=16, schedule=Tapered())
    average: bool = False
    by_examples: bool = False

    def start(self, task: Task, info: Info) -> Server:
        model = Point(info.initial)
        return Server(model, model if self.average else None, info.initial.new_zeros(()))

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        weight = cohort.n if self.by_examples else torch.ones_like(cohort.n)
        return change(self.train(task, message.theta, cohort), message.theta, weight), None

    def fuse(self, server: Server, update: Weighted) -> Server:
        model, rounds = Point(server.model.theta + update.mean.theta), server.rounds + 1
        average = server.average
        if average is not None:
            average = Point(average.theta + (model.theta - average.theta) / rounds)
        return Server(model, average, rounds)

    def posterior(self, server: Server) -> Point:
        return server.model if server.average is None else server.average
