"""Laplace: the curvature at the mean as diagonal Fisher information."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from consilience.core.gaussian import Gaussian
from consilience.data.cohort import Cohort
from consilience.inference.tilted import Curved, within_two_deviations
from consilience.tasks.task import Task


@dataclass(frozen=True)
class Laplace(Curved):
    """F is the mean squared gradient of an example with a label drawn from the model, over `epochs` passes with new
    labels. `clip` limits it to mean ± 2 standard deviations over coordinates, as in the paper. With `augmented`, every
    pass sees other augmented inputs, as in training.

    The paper's code takes 5 epochs for FedSEP and 10 augmented ones for FedEP. The defaults are 5 epochs of the inputs
    that predictions are made for."""

    letter: ClassVar[str] = "L"
    clip: bool = True
    augmented: bool = field(default=False, kw_only=True)

    def curvature(self, task: Task, cavity: Gaussian, mean: Tensor, cohort: Cohort) -> Tensor:
        passes = [
            cohort.mean(task.fisher, mean, self.batch_size, tag=f"fisher {epoch}", augmented=self.augmented)
            for epoch in range(self.epochs)
        ]
        fisher = sum(passes[1:], passes[0]) / self.epochs
        return within_two_deviations(fisher) if self.clip else fisher
