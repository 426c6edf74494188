"""The two references that users want to know: what if nobody shares, and what if everybody could."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.core.records import Point, Weighted
from consilience.data.cohort import Cohort, Info
from consilience.data.federation import Federation
from consilience.optim import SGD, Chain
from consilience.tasks.task import Task


@algorithm
class LocalOnly(Algorithm):
    """Every client trains alone on its own data and uses its own model: the floor.
    The server's model is the plain local average, Σ p_k w_k over the last round's clients, which no score is about."""

    alone: ClassVar[bool] = True
    train: Chain = SGD()

    def start(self, task: Task, info: Info) -> Point:
        """The module's own weights."""
        return Point(info.initial)

    def client(self, task: Task, info: Info, n: Tensor) -> Point:
        """Every client begins there too."""
        return Point(info.initial.repeat(len(n), 1))

    def local(self, task: Task, message: Point, state: Point, cohort: Cohort) -> tuple[Weighted, Point]:
        """Go on from where this client stopped; what the server says is ignored."""
        trained = Point(self.train(task, state.theta, cohort))
        return Weighted.of(trained, cohort.n), trained

    def follow(self, state: Point, update: Weighted) -> Point:
        """The update is the model."""
        return Point(update.mean.theta)

    def fuse(self, server: Point, update: Weighted) -> Point:
        """The average of the local models."""
        return Point(update.mean.theta)

    def posterior(self, server: Point) -> Point:
        """The average, for what it is worth."""
        return server

    def personal(self, server: Point, state: Point) -> Point:
        """A client's own model."""
        return state


@algorithm
class Pooled(Algorithm):
    """Training on everybody's data in one place: the bound that privacy forbids, and only a simulator can run."""

    train: Chain = SGD()

    def arrange(self, federation: Federation) -> Federation:
        """One client with all examples."""
        return federation.pooled()

    def start(self, task: Task, info: Info) -> Point:
        """The module's own weights."""
        return Point(info.initial)

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Point, None]:
        """Plain training."""
        return Point(self.train(task, message.theta, cohort)), None

    def fuse(self, server: Point, update: Point) -> Point:
        """The one client's model."""
        return update

    def posterior(self, server: Point) -> Point:
        """A point."""
        return server
