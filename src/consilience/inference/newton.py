"""Newton: exact inference for linear-Gaussian models, Laplace's with the full Hessian for logistic ones."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from consilience.core import Count, Gaussian, NonNegative
from consilience.data.cohort import Cohort
from consilience.inference.tilted import Tilted
from consilience.tasks.task import Task


@dataclass(frozen=True)
class Newton(Tilted):
    """Λ = ∇²E(θ), η = Λθ − ∇E(θ) with E = −log p(D_k|θ) − log q₋ₖ(θ): the second-order expansion of exp(−E) at θ. θ is
    then its mean, at most `steps` times. One step is exact where E is quadratic.

    Costs P² numbers for each client, so it is for small models. Sites start without information, so the algorithm needs
    a prior. `diagonal` keeps the mean and each coordinate's variance, without correlations. If examples of a batch
    depend on each other, as in Cox's partial likelihood, all examples of a client are one batch."""

    letter: ClassVar[str] = "N"
    steps: Count = 30
    tolerance: NonNegative = 1e-10
    batch_size: Count = 1024
    diagonal: bool = False

    def site(self, mean: Tensor, n: Tensor) -> Gaussian:
        eta = torch.zeros_like(mean).expand(*n.shape[:-1], -1).clone()
        return Gaussian(eta, torch.zeros_like(eta if self.diagonal else eta.unsqueeze(-1) * eta.unsqueeze(-2)))

    def __call__(self, task: Task, cavity: Gaussian, start: Tensor, cohort: Cohort) -> Gaussian:
        """Newton steps until no coordinate of any client moves by more than the tolerance and rounding."""
        theta, rounding = start.expand(len(cohort), -1), 64 * torch.finfo(start.dtype).eps
        for _ in range(self.steps):
            likelihood = self._expand(task, theta, cohort)
            tilted = likelihood * cavity
            before, theta = theta, tilted.mean
            near = self.tolerance + rounding * theta.abs().amax(-1, keepdim=True)
            if bool(((theta - before).abs() <= near).all()):
                break
        return Gaussian.of(theta, 1 / tilted.variance) if self.diagonal else tilted

    def _expand(self, task: Task, theta: Tensor, cohort: Cohort) -> Gaussian:
        """p(D_k|θ) around θ to second order."""
        size = int(cohort.n.max()) if task.whole_batch else self.batch_size
        gradient = cohort.n * cohort.mean(task.gradient(), theta, size)
        curvature = cohort.n.unsqueeze(-1) * cohort.mean(task.hessian, theta, size)
        return Gaussian((curvature @ theta.unsqueeze(-1)).squeeze(-1) - gradient, curvature)
