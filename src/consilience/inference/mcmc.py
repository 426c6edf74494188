"""MCMC: the precision from the variance of a chain's samples."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from consilience.core import ConfigError, Gaussian, Positive, Range, Ranges, Share, guards
from consilience.data.cohort import Cohort
from consilience.inference.tilted import Tilted, moments_of, samples, scaled_diagonal, within_two_deviations
from consilience.optim import SGD, Chain
from consilience.tasks.task import Task


@dataclass(frozen=True)
class MCMC(Tilted):
    """Σ = ρ·1 + (1 − ρ)·S, with S the variance of one sample an epoch, of SGD, SGLD or SGHMC.

    A few iterates of SGD show relative variances only: by default the precision is clipped to mean ± 2 standard
    deviations and rescaled to the length of the scaled identity's, c·n_k + Λ₋ₖ. `rescale=False` keeps the variances of
    a sampler with many epochs as they are. `scale` is c, `shrink` is ρ."""

    letter: ClassVar[str] = "M"
    ranges: ClassVar[Ranges] = {"scale": Range(5e-3, 5.0)}
    train: Chain = SGD(epochs=5)
    scale: Positive = 0.05
    shrink: Share = 1e-4
    rescale: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.passes < 2:
            got = "mixed ones" if self.train.mixed else self.train.epochs
            raise ConfigError(f"one sample an epoch: a variance needs epochs of at least 2, got {got}")

    @property
    def measures_precision(self) -> bool:
        return not self.rescale

    def site(self, mean: Tensor, n: Tensor) -> Gaussian:
        return scaled_diagonal(mean, n, self.scale)

    def __call__(self, task: Task, cavity: Gaussian, start: Tensor, cohort: Cohort) -> Gaussian:
        mean, variance = moments_of(samples(self.train, task, cavity, start, cohort))
        precision = 1 / (self.shrink + (1 - self.shrink) * variance)
        if self.rescale:
            precision = within_two_deviations(precision)
            wanted = (cavity.lam + self.scale * cohort.n).expand_as(precision)
            precision = precision * (wanted.norm(dim=-1, keepdim=True) / precision.norm(dim=-1, keepdim=True))
        guards.count("precision below the cavity's", precision < cavity.lam)
        return Gaussian.of(mean, precision)
