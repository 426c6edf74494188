"""MCMC: the precision from the scatter of a chain's samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from consilience.core import guards
from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.core.ranges import Range, Ranges
from consilience.data.cohort import Cohort
from consilience.inference.tilted import Tilted, moments_of, samples, scaled_diagonal, within_two_deviations
from consilience.optim import SGD, Chain
from consilience.tasks.task import Task


@dataclass(frozen=True)
class MCMC(Tilted):
    """Σ = ρ·1 + (1 − ρ)·S with S the variance of one sample an epoch, of SGD, SGLD or SGHMC.

    A handful of SGD's iterates tells which directions are loose, not how loose: by default the precision is clipped to
    mean ± 2 standard deviations and rescaled to the length of the scaled identity's, c·n_k + Λ₋ₖ. With a true sampler
    and many epochs `rescale=False` takes the variances at their word.
    """

    letter: ClassVar[str] = "M"
    ranges: ClassVar[Ranges] = {"scale": Range(5e-3, 5.0)}
    train: Chain = SGD(epochs=5)
    scale: float = 0.05
    shrink: float = 1e-4
    rescale: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.epochs < 2:
            raise ConfigError(f"one sample an epoch: a variance needs epochs of at least 2, got {self.train.epochs}")
        if not (self.scale > 0 and 0 < self.shrink <= 1):
            raise ConfigError(f"scale must be positive and shrink in (0, 1], got {self.scale} and {self.shrink}")

    def site(self, mean: Tensor, n: Tensor) -> Gaussian:
        """Precision c·n for every coordinate."""
        return scaled_diagonal(mean, n, self.scale)

    def __call__(self, task: Task, cavity: Gaussian, start: Tensor, cohort: Cohort) -> Gaussian:
        """Mean and shrunk precision of the samples."""
        mean, variance = moments_of(samples(self.train, task, cavity, start, cohort))
        precision = 1 / (self.shrink + (1 - self.shrink) * variance)
        if self.rescale:
            precision = within_two_deviations(precision)
            wanted = (cavity.lam + self.scale * cohort.n).expand_as(precision)
            precision = precision * (wanted.norm(dim=-1, keepdim=True) / precision.norm(dim=-1, keepdim=True))
        guards.count("precision below the cavity's", precision < cavity.lam)
        return Gaussian.of(mean, precision)
