"""FedSEP: expectation propagation without state at the clients (Guo et al., 2023)."""

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.factors import Factors
from consilience.core.gaussian import Gaussian
from consilience.data.cohort import Cohort
from consilience.tasks.task import Task


@algorithm
class FedSEP(Factors):
    """A client removes its share of q instead of its own factor: cavity q₋ₖ = p₀ (q / p₀)^(1 − n_k/N), N examples in
    all. Clients keep no state, so there may be any number of them, each seen once."""

    def local(self, task: Task, message: Gaussian, state: None, cohort: Cohort) -> tuple[Gaussian, None]:
        q, prior = message, self.before(message.eta)
        cavity = prior * (q / prior) ** (1 - cohort.n / cohort.examples)
        tilted = self.infer(task, cavity, q.mean, cohort)
        return self.damped(self.infer.refinement(tilted, q), cohort), None
