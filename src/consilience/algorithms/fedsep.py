"""FedSEP: expectation propagation without state at the clients (Guo et al., 2023)."""

from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.factors import Factors
from consilience.core.gaussian import Gaussian
from consilience.data.cohort import Cohort
from consilience.tasks.task import Task


@algorithm
class FedSEP(Factors):
    """A client removes its share of q instead of its own factor: cavity q₋ₖ = p₀ (q / p₀)^(1 − n_k/N), N examples in
    all. Clients keep no state, so there may be any number of them, each seen once."""

    def cavity(self, q: Gaussian, state: None, share: Tensor) -> Gaussian:
        prior = self.before(q.eta)
        return prior * (q / prior) ** (1 - share)

    def local(self, task: Task, message: Gaussian, state: None, cohort: Cohort) -> tuple[Gaussian, None]:
        q = message
        tilted = self.infer.near(task, self.cavity(q, state, cohort.share), q, cohort)
        return self.damped(self.infer.refinement(tilted, q), cohort), None
