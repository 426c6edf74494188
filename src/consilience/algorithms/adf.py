"""ADF: assumed density filtering, whose cavity is the whole posterior."""

from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.factors import Factors
from consilience.core.gaussian import Gaussian
from consilience.data.cohort import Cohort
from consilience.tasks.task import Task


@algorithm
class ADF(Factors):
    """cavity = q: correct for data that is seen once. Here it is a baseline: every further visit counts the same data
    again, so the precision grows without bound and learning stops."""

    def cavity(self, q: Gaussian, state: None, share: Tensor) -> Gaussian:
        return Gaussian(q.eta.expand(len(share), -1), q.lam.expand(len(share), *q.lam.shape))

    def local(self, task: Task, message: Gaussian, state: None, cohort: Cohort) -> tuple[Gaussian, None]:
        q = message
        tilted = self.infer.near(task, self.cavity(q, state, cohort.share), q, cohort)
        return self.damped(tilted / q, cohort), None
