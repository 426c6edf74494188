"""ADF: assumed density filtering, whose cavity is the whole posterior."""

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.factors import Factors
from consilience.core.gaussian import Gaussian
from consilience.data.cohort import Cohort
from consilience.tasks.task import Task


@algorithm
class ADF(Factors):
    """cavity = q: correct for data that is seen once. Here it is a baseline: every further visit counts the same data
    again, so the precision grows without bound and learning stops."""

    def local(self, task: Task, message: Gaussian, state: None, cohort: Cohort) -> tuple[Gaussian, None]:
        q = message
        cavity = Gaussian(q.eta.expand(len(cohort), -1), q.lam.expand(len(cohort), *q.lam.shape))
        return self.damped(self.infer(task, cavity, q.mean, cohort) / q, cohort), None
