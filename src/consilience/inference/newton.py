"""Newton: exact inference for linear-Gaussian models, Laplace's with the full Hessian for logistic ones."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from consilience.core import Count, Gaussian, NonNegative
from consilience.data.cohort import Cohort
from consilience.inference.tilted import Tilted
from consilience.tasks.task import Task

HALVINGS = 20  # of a step at most


@dataclass(frozen=True)
class Newton(Tilted):
    """Λ = ∇²E(θ), η = Λθ − ∇E(θ) with E = −log p(D_k|θ) − log q₋ₖ(θ): the second-order expansion of exp(−E) at θ. θ is
    then its mean, at most `steps` times. One step is exact where E is quadratic.

    Costs P² numbers for each client, so it is for small models. Sites start without information, so the algorithm needs
    a prior. `diagonal` keeps the mean and each coordinate's variance, without correlations. If examples of a batch
    depend on each other, as in Cox's partial likelihood, all examples of a client are one batch."""

    letter: ClassVar[str] = "N"
    starts_flat: ClassVar[bool] = True
    steps: Count = 30
    tolerance: NonNegative = 1e-10
    batch_size: Count = 1024
    diagonal: bool = False

    def site(self, mean: Tensor, n: Tensor) -> Gaussian:
        eta = torch.zeros_like(mean).expand(*n.shape[:-1], -1).clone()
        return Gaussian(eta, torch.zeros_like(eta if self.diagonal else eta.unsqueeze(-1) * eta.unsqueeze(-2)))

    def __call__(self, task: Task, cavity: Gaussian, start: Tensor, cohort: Cohort) -> Gaussian:
        """Newton steps until no coordinate of any client moves by more than the tolerance and rounding. A step that
        does not lower E is halved."""
        theta, rounding = start.expand(len(cohort), -1), 64 * torch.finfo(start.dtype).eps
        energy = self._energy(task, cavity, theta, cohort)
        for _ in range(self.steps):
            tilted, before = self._expand(task, theta, cohort) * cavity, theta
            theta, energy, shortened = self._descend(task, cavity, before, tilted.mean, energy, cohort)
            near = self.tolerance + rounding * theta.abs().amax(-1, keepdim=True)
            if bool(((theta - before).abs() <= near).all()):
                break
        if self.diagonal:
            return Gaussian.of(theta, 1 / tilted.variance)
        return Gaussian(torch.where(shortened, Gaussian.of(theta, tilted.lam).eta, tilted.eta), tilted.lam)

    def _descend(
        self, task: Task, cavity: Gaussian, before: Tensor, theta: Tensor, energy: Tensor, cohort: Cohort
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(θ, E(θ) [K, 1], whether the step was shortened [K, 1]) after a step to θ, or to a point on the way to it."""
        full, found = theta, self._energy(task, cavity, theta, cohort)
        for _ in range(HALVINGS):
            rises = ~(found <= energy + 64 * torch.finfo(energy.dtype).eps * energy.abs())
            if not bool(rises.any()):
                break
            theta = torch.where(rises, (before + theta) / 2, theta)
            found = torch.where(rises, self._energy(task, cavity, theta, cohort), found)
        return theta, found, (theta != full).any(-1, keepdim=True)

    def _energy(self, task: Task, cavity: Gaussian, theta: Tensor, cohort: Cohort) -> Tensor:
        """E(θ) of each client without the cavity's constant [K, 1]."""
        loss = cohort.mean(task.vectorize(type(task).loss_one), theta, self._rows(task, cohort))
        prior = ((cavity.energy_gradient(theta) - cavity.eta) * theta).sum(-1, keepdim=True) / 2
        return cohort.n * loss.unsqueeze(-1) + prior

    def _rows(self, task: Task, cohort: Cohort) -> int:
        """The examples of a batch: all that a client has where the loss of one depends on others."""
        return int(cohort.n.max()) if task.whole_batch else self.batch_size

    def _expand(self, task: Task, theta: Tensor, cohort: Cohort) -> Gaussian:
        """p(D_k|θ) around θ to second order."""
        size = self._rows(task, cohort)
        gradient = cohort.n * cohort.mean(task.gradient(), theta, size)
        curvature = cohort.n.unsqueeze(-1) * cohort.mean(task.hessian, theta, size)
        return Gaussian((curvature @ theta.unsqueeze(-1)).squeeze(-1) - gradient, curvature)
