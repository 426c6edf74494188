"""FedAvg: clients train, the server averages (McMahan et al., 2017)."""

from __future__ import annotations

from consilience.algorithms.base import Algorithm, algorithm
from consilience.core.records import Point, Weighted, record
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGD, Chain
from consilience.server.optimizers import Moments, Momentum, ServerOptimizer, carry_over
from consilience.tasks.task import Task


@record
class Averaged:
    """The global weights and the server optimiser's memory."""

    model: Point
    memory: Moments


def continued(info: Info, server: ServerOptimizer) -> Averaged:
    """The initial weights; if a phase before has an optimiser's memory, it is carried over."""
    model = Point(info.initial)
    memory = server.start(model)
    if isinstance(info.before, Averaged):
        memory = carry_over(info.before.memory, memory)
    return Averaged(model, memory)


@algorithm
class FedAvg(Algorithm):
    """w ← w + η_s Σ p_k (w_k − w), p_k = n_k / Σ n over the round's clients; w_k by local training from w.

    `train` may be any chain; its memory, such as momentum, starts at 0 each round.
    `server` may be any optimiser on the mean update: `Adam` gives FedAdam, `Yogi` FedYogi, `AdaGrad` FedAdagrad.
    """

    train: Chain = SGD()
    server: ServerOptimizer = Momentum()

    def start(self, task: Task, info: Info) -> Averaged:
        """Everyone begins with the module's own weights."""
        return continued(info, self.server)

    def message(self, server: Averaged, ids: object) -> Point:
        """The global weights; the optimiser's memory stays at home."""
        return server.model

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        """Train from w; send n_k (w_k − w)."""
        delta = self.train(task.gradient(), message.theta, cohort).sub_(message.theta)
        return Weighted(Point(delta.mul_(cohort.n)), cohort.n), None

    def fuse(self, server: Averaged, update: Weighted) -> Averaged:
        """A server step along the mean change."""
        return Averaged(*self.server.step(server.model, update.mean, server.memory))

    def posterior(self, server: Averaged) -> Point:
        """A point: FedAvg knows no uncertainty."""
        return server.model
