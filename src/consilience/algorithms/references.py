"""Two references: no client shares anything, and all data is in one place."""

from typing import ClassVar

from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.core.records import Point, Weighted
from consilience.data import Cohort, Federation, Info
from consilience.optim import SGD, Chain
from consilience.tasks.task import Task


@algorithm
class LocalOnly(Algorithm):
    """Every client trains on its own data and uses its own model: the lower reference. The server's model is the mean
    Σ p_k w_k over the last round's clients, which no score is about."""

    alone: ClassVar[bool] = True
    train: Chain = SGD()

    def start(self, task: Task, info: Info) -> Point:
        return Point(info.initial)

    def client(self, task: Task, info: Info, n: Tensor) -> Point:
        return Point(info.initial.repeat(len(n), 1))

    def local(self, task: Task, message: Point, state: Point, cohort: Cohort) -> tuple[Weighted, Point]:
        trained = Point(self.train(task, state.theta, cohort))
        return Weighted.of(trained, cohort.n), trained

    def follow(self, state: Point, update: Weighted) -> Point:
        return Point(update.mean.theta)

    def fuse(self, server: Point, update: Weighted) -> Point:
        return Point(update.mean.theta)

    def posterior(self, server: Point) -> Point:
        return server

    def personal(self, server: Point, state: Point) -> Point:
        return state


@algorithm
class Pooled(Algorithm):
    """Training on all data in one place: the upper reference. Only a simulator can run it."""

    train: Chain = SGD()

    def arrange(self, federation: Federation) -> Federation:
        return federation.pooled()

    def start(self, task: Task, info: Info) -> Point:
        return Point(info.initial)

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Point, None]:
        return Point(self.train(task, message.theta, cohort)), None

    def fuse(self, server: Point, update: Point) -> Point:
        return update

    def posterior(self, server: Point) -> Point:
        return server
