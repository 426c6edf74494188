"""SA-FL: federated learning as stochastic approximation, with steps that taper off and an ODE to follow."""

from __future__ import annotations

from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.core.records import Point, Weighted, record
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGD, Chain, Tapered
from consilience.tasks.task import Task


@record
class Approximation:
    """The mean w̄ of the clients' weights, its average over the rounds so far, and their number."""

    model: Point
    average: Point | None
    rounds: Tensor


@algorithm
class SAFL(Algorithm):
    """w_k ← w_k − a_n ∇f_k(w_k), N times, from the common w̄; then w̄ ← 1/L Σ w_k. With a_n = C/n^δ, ¾ < δ ≤ 1, w̄ follows
    ẇ = −1/L Σ ∇f_k(w), and where that is asymptotically stable it converges to an equilibrium with probability one.

    The mean is uniform, whatever the clients' sizes: with weights n_k (`by_examples`) the ODE is that of Σ p_k f_k.
    `average` takes the mean of w̄ over all rounds (Polyak & Ruppert), the usual companion of tapering steps.
    """

    train: Chain = SGD(lr=0.1, epochs=5, batch_size=16, schedule=Tapered())
    average: bool = False
    by_examples: bool = False

    def start(self, task: Task, info: Info) -> Approximation:
        """The module's own weights."""
        model = Point(info.initial)
        return Approximation(model, model if self.average else None, info.initial.new_zeros(()))

    def message(self, server: Approximation, ids: object) -> Point:
        """w̄."""
        return server.model

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        """Train from w̄; send w_k − w̄."""
        delta = self.train(task, message.theta, cohort).sub_(message.theta)
        weight = cohort.n if self.by_examples else cohort.n.new_ones(cohort.n.shape)
        return Weighted(Point(delta.mul_(weight)), weight), None

    def fuse(self, server: Approximation, update: Weighted) -> Approximation:
        """The mean, and the mean of means."""
        model, rounds = Point(server.model.theta + update.mean.theta), server.rounds + 1
        average = server.average
        if average is not None:
            average = Point(average.theta + (model.theta - average.theta) / rounds)
        return Approximation(model, average, rounds)

    def posterior(self, server: Approximation) -> Point:
        """A point: w̄, or its average."""
        return server.model if server.average is None else server.average
