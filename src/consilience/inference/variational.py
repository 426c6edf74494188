"""Variational: the Gaussian with the smallest divergence from likelihood times cavity, by IVON."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from consilience.core.gaussian import Gaussian
from consilience.data.cohort import Cohort
from consilience.inference.tilted import Tilted, scaled_diagonal
from consilience.optim.ivon import IVON
from consilience.tasks.task import Task


@dataclass(frozen=True)
class Variational(Tilted):
    """q̂ = argmin E_q̂[κ ℓ_k(θ)] + KL(q̂ ‖ q₋ₖ) over diagonal Gaussians, with ℓ_k the negative log-likelihood of all n_k
    examples and κ that of `train`. Mean and precision are IVON's: Λ = κ n_k (h + wd) + Λ₋ₖ.

    IVON starts at the belief q, mean and precision. Sites start with h = h₀."""

    letter: ClassVar[str] = "IVON"
    train: IVON = IVON()

    def site(self, mean: Tensor, n: Tensor) -> Gaussian:
        return scaled_diagonal(mean, n, self.train.kappa * (self.train.h0 + self.train.weight_decay))

    def __call__(self, task: Task, cavity: Gaussian, start: Tensor, cohort: Cohort) -> Gaussian:
        h = torch.full_like(start.expand(len(cohort), -1), self.train.h0)
        return self._found(task, cavity, start, h, cohort, 1.0)

    def near(self, task: Task, cavity: Gaussian, q: Gaussian, cohort: Cohort, power: float = 1.0) -> Gaussian:
        q = q.proper()
        weight = self.train.kappa * cohort.n
        h = (q.lam / power - cavity.lam) / weight - self.train.weight_decay
        return self._found(task, cavity, q.mean, h.expand(len(cohort), q.eta.shape[-1]).clone(), cohort, power)

    def _found(self, task: Task, cavity: Gaussian, start: Tensor, h: Tensor, cohort: Cohort, power: float) -> Gaussian:
        """The Gaussian with the smallest divergence from (likelihood^κ · cavity)^power, from the curvature h [K, P]."""
        weight = self.train.kappa * cohort.n
        chain, prior = replace(self.train, kappa=self.train.kappa * power), cavity ** (1 / weight)
        theta = start.expand(len(cohort), -1).clone()
        momentum, _, steps = chain.memory(theta)
        for last in chain.iterates(
            chain.gradient(task), theta, cohort, pace=task.pace, running=task.running, prior=prior,
            memory=(momentum, h, steps),
        ):  # fmt: skip
            theta = last
        return Gaussian.of(theta, power * (weight * (h + self.train.weight_decay) + cavity.lam))
