"""Ditto: a global model, and for every client one of its own near it (Li et al., 2021)."""

from typing import ClassVar

from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.averaging import Averaging, change
from consilience.core import Gaussian, NonNegative, Point, Range, Ranges, Weighted, record
from consilience.data.cohort import Cohort, Info
from consilience.tasks.task import Task


@record
class Client:
    """The client's own model v_k [K, P]."""

    own: Tensor


@algorithm
class Ditto(Averaging):
    """w as in FedAvg. Beside it every client trains a model v_k of its own, from its last one, on loss + λ/2 ‖v_k − w‖²
    with the w that it has received. Known clients predict with v_k, new ones with w.

    λ = `lam`. λ = 0 is every client alone; for λ → ∞ all v_k are w."""

    ranges: ClassVar[Ranges] = {"lam": Range(0.1, 10.0)}
    lam: NonNegative = 1.0

    def client(self, task: Task, info: Info, n: Tensor) -> Client:
        return Client(info.initial.repeat(len(n), 1))

    def local(self, task: Task, message: Point, state: Client, cohort: Cohort) -> tuple[Weighted, Client]:
        w = message.theta
        update = change(self.train(task, w, cohort), w, cohort.n)
        near = Gaussian.of(w, w.new_full((1,), self.lam))
        return update, Client(self.train(task, state.own, cohort, prior=near))

    def personal(self, server: object, state: Client) -> Point:
        return Point(state.own)
