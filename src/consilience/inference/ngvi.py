"""NGVI: the curvature by natural-gradient variational inference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from consilience.core import keys
from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.data.cohort import Cohort
from consilience.inference.tilted import Curved
from consilience.tasks.task import Task


@dataclass(frozen=True)
class NGVI(Curved):
    """Each batch: θ ~ N(μ, Λ⁻¹) with Λ = n_k (F + wd) + Λ₋ₖ, then F ← β F + (1 − β) F̄(θ), the Fisher information
    averaged over `samples` draws, from F = 0. μ stays where SGD put it, κ acts at the end only.

    Curvature averaged over the belief instead of taken at its mean: what is sharp at one point only counts less. Any
    Gaussian cavity is its prior. As F begins at 0 without bias correction, few steps leave it small.
    """

    letter: ClassVar[str] = "V"
    samples: int = 5
    beta: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 1 or not 0 <= self.beta < 1:
            raise ConfigError(f"samples must be at least 1 and beta in [0, 1), got {self.samples} and {self.beta}")

    def curvature(self, task: Task, cavity: Gaussian, mean: Tensor, cohort: Cohort) -> Tensor:
        """A running average over draws and batches."""
        running, decay = torch.zeros_like(mean), self.train.weight_decay
        for epoch in range(self.epochs):
            for step, (k, batch) in enumerate(cohort.epoch(self.train.epochs + epoch, self.batch_size)):
                spread = Gaussian(cavity.eta, cohort.n * (running + decay) + cavity.lam).first(k).variance.sqrt()
                fisher = torch.zeros_like(spread)
                for draw in range(self.samples):
                    noise = cohort.noise(k, mean.shape[1], tag=f"ngvi {epoch} {step} {draw}")
                    labelled = replace(batch, key=keys.fold(batch.key, f"draw {draw}"))
                    fisher += task.fisher(mean[:k] + spread * noise, labelled) / self.samples
                running[:k] = self.beta * running[:k] + (1 - self.beta) * fisher
        return running
