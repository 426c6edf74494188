"""ADF: assumed density filtering, which forgets to take out what it put in."""

from __future__ import annotations

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.factors import Factors
from consilience.core.gaussian import Gaussian
from consilience.data.cohort import Cohort
from consilience.tasks.task import Task


@algorithm
class ADF(Factors):
    """cavity = q: right for data that is seen once, and a foil here. Every further visit counts the same data again, so
    the precision grows without bound and learning stops for false confidence."""

    def local(self, task: Task, message: Gaussian, state: None, cohort: Cohort) -> tuple[Gaussian, None]:
        """Cavity, tilted, Δ."""
        q = message
        cavity = Gaussian(q.eta.expand(len(cohort), -1), q.lam.expand(len(cohort), *q.lam.shape))
        return self.damped(self.infer(task, cavity, q.mean, cohort) / q, cohort), None
