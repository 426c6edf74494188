"""NGVI: the curvature by natural-gradient variational inference."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from consilience.core import Count, Fraction, Gaussian, keys
from consilience.data.cohort import Cohort
from consilience.inference.tilted import Curved, within_two_deviations
from consilience.tasks.task import Task


@dataclass(frozen=True)
class NGVI(Curved):
    """For each batch θ ~ N(μ, Λ⁻¹) with Λ = n_k (F + wd) + Λ₋ₖ, then F ← β F + (1 − β) F̄(θ), the Fisher information
    averaged over `samples` draws, from F = 0. μ is the mean that SGD found; κ acts at the end only.

    The curvature is averaged over the posterior, so a sharp curvature at one point counts less. F starts at 0 without
    bias correction, so few steps leave it small. `clip` limits F̄ of every batch to mean ± 2 standard deviations over
    coordinates, as the paper's code does: a coordinate that one batch finds very sharp is otherwise narrow for the rest
    of the round, and its precision up to a tenth larger."""

    letter: ClassVar[str] = "V"
    samples: Count = 5
    beta: Fraction = 0.99
    clip: bool = field(default=True, kw_only=True)

    def curvature(self, task: Task, cavity: Gaussian, mean: Tensor, cohort: Cohort) -> Tensor:
        running, decay = torch.zeros_like(mean), self.train.weight_decay
        for epoch in range(self.epochs):
            for step, (k, batch) in enumerate(cohort.epoch(self.train.epochs + epoch, self.batch_size)):
                spread = Gaussian(cavity.eta, cohort.n * (running + decay) + cavity.lam).first(k).variance.sqrt()
                fisher = torch.zeros_like(spread)
                for draw in range(self.samples):
                    noise = cohort.noise(k, mean.shape[1], tag=f"ngvi {epoch} {step} {draw}")
                    labelled = replace(batch, key=keys.fold(batch.key, f"draw {draw}"))
                    fisher += task.fisher(mean[:k] + spread * noise, labelled) / self.samples
                fisher = within_two_deviations(fisher) if self.clip else fisher
                running[:k] = self.beta * running[:k] + (1 - self.beta) * fisher
        return running
