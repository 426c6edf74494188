"""FedProx: FedAvg with a proximal term (Li et al., 2020)."""

from typing import ClassVar

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.averaging import Averaging, change
from consilience.core import Gaussian, NonNegative, Point, Range, Ranges, Weighted
from consilience.data.cohort import Cohort
from consilience.tasks.task import Task


@algorithm
class FedProx(Averaging):
    """Clients minimise loss + μ/2 ‖w_k − w‖², so w is a Gaussian prior of precision μ. μ = 0 is FedAvg."""

    ranges: ClassVar[Ranges] = {"mu": Range(1e-3, 1.0)}
    mu: NonNegative = 0.1

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        w = message.theta
        proximal = Gaussian.of(w, w.new_full((1,), self.mu))
        return change(self.train(task, w, cohort, prior=proximal), w, cohort.n), None
