"""Tilted inference: a client's data meets what everyone else believes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from consilience.core.checks import check_types
from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.core.ranges import Range, Ranges
from consilience.data.cohort import Cohort
from consilience.optim import SGD, Chain
from consilience.tasks.task import Task


class Tilted(ABC):
    """A Gaussian q̂(θ) ≈ p(D_k | θ) q₋ₖ(θ) for every client of a cohort, from its data D_k and its cavity q₋ₖ."""

    letter: ClassVar[str]
    """As in the papers' tables: FedEP(I), FedEP(L), …"""

    def __post_init__(self) -> None:
        check_types(self)

    @abstractmethod
    def site(self, mean: Tensor, n: Tensor) -> Gaussian:
        """What n examples are worth before anybody has looked at them: a factor around `mean` [P], with the client
        axis of n [K, 1] or, for n [1], without."""

    @abstractmethod
    def __call__(self, task: Task, cavity: Gaussian, start: Tensor, cohort: Cohort) -> Gaussian:
        """The tilted distribution of each client; chains begin at `start` [P]."""

    def refinement(self, tilted: Gaussian, q: Gaussian) -> Gaussian:
        """What tilted says beyond q, where the cavity was q without this client."""
        return tilted / q


def samples(chain: Chain, task: Task, cavity: Gaussian, start: Tensor, cohort: Cohort) -> Iterator[Tensor]:
    """One sample [K, P] an epoch from a chain on the tilted energy −log p(D_k|θ) − log q₋ₖ(θ), scaled by 1/n; the same
    tensor every time."""
    return chain.iterates(task.gradient(), start, cohort, pace=task.pace, prior=cavity ** (1 / cohort.n))


def mean_of(drawn: Iterator[Tensor]) -> Tensor:
    """The mean over samples."""
    total, count = next(drawn).clone(), 1
    for sample in drawn:
        total, count = total.add_(sample), count + 1
    return total.div_(count)


def moments_of(drawn: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance over samples, summed up as they come (Welford)."""
    mean, count = next(drawn).clone(), 1
    squares = torch.zeros_like(mean)
    for sample in drawn:
        count += 1
        off = sample - mean
        mean += off / count
        squares += off * (sample - mean)
    return mean, squares / (count - 1)


def scaled_identity(mean: Tensor, n: Tensor, scale: float) -> Gaussian:
    """N(mean, 1 / (scale · n)): one precision for all coordinates, so a factor is P + 1 numbers."""
    return Gaussian.of(mean.expand(*n.shape[:-1], -1).clone(), scale * n)


def scaled_diagonal(mean: Tensor, n: Tensor, scale: float) -> Gaussian:
    """The same with a number for every coordinate, for precisions that will differ."""
    same = scaled_identity(mean, n, scale)
    return Gaussian(same.eta, same.lam.expand_as(same.eta).clone())


@dataclass(frozen=True)
class Identity(Tilted):
    """Scaled identity: Λ = c·n_k + Λ₋ₖ, the mean by SGD. With sites that start at c·n_k the precision never changes,
    so none travels: a message is P + 1 numbers."""

    letter: ClassVar[str] = "I"
    ranges: ClassVar[Ranges] = {"scale": Range(5e-3, 5.0)}
    train: SGD = SGD()
    scale: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.scale > 0:
            raise ConfigError(f"scale is the precision that an example brings and must be positive, got {self.scale}")

    def site(self, mean: Tensor, n: Tensor) -> Gaussian:
        """Precision c·n, a scalar."""
        return scaled_identity(mean, n, self.scale)

    def __call__(self, task: Task, cavity: Gaussian, start: Tensor, cohort: Cohort) -> Gaussian:
        """The mean of the epochs' iterates, and c·n_k more precision than the cavity."""
        mean = mean_of(samples(self.train, task, cavity, start, cohort))
        return Gaussian.of(mean, cavity.lam + self.scale * cohort.n)

    def refinement(self, tilted: Gaussian, q: Gaussian) -> Gaussian:
        """η changes and Λ does not: exactly, where a difference would leave rounding for an optimiser to blow up."""
        delta = tilted / q
        return Gaussian(delta.eta, torch.zeros_like(delta.lam))


def within_two_deviations(value: Tensor) -> Tensor:
    """Every row's entries [K, P] clipped to the row's mean ± 2 standard deviations."""
    deviation, mean = torch.std_mean(value, dim=-1, correction=0, keepdim=True)
    return value.clamp(mean - 2 * deviation, mean + 2 * deviation)


@dataclass(frozen=True)
class Curved(Tilted):
    """Λ = κ n_k (F + wd) + Λ₋ₖ at the mean that SGD found; kinds differ in the curvature F of an example's loss.

    κ = 1 is the likelihood as it is; networks with far more weights than data want it colder (the papers' 500). Sites
    start with F = s₀. `batch` is how many examples' gradients are in memory at once.
    """

    ranges: ClassVar[Ranges] = {"kappa": Range(1.0, 1000.0)}
    train: SGD = SGD()
    kappa: float = 500.0
    s0: float = 1e-4
    epochs: int = 5
    batch_size: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.kappa > 0 and self.s0 >= 0 and self.s0 + self.train.weight_decay > 0):
            raise ConfigError(
                "kappa (s0 + weight_decay) is the precision that an example brings at the start and must be positive, "
                f"got kappa={self.kappa}, s0={self.s0}, weight_decay={self.train.weight_decay}"
            )
        if min(self.epochs, self.batch_size) < 1:
            raise ConfigError(f"epochs and batch_size must be at least 1, got {self.epochs} and {self.batch_size}")

    @abstractmethod
    def curvature(self, task: Task, cavity: Gaussian, mean: Tensor, cohort: Cohort) -> Tensor:
        """F [K, P] ≥ 0."""

    def site(self, mean: Tensor, n: Tensor) -> Gaussian:
        """Precision κ (s₀ + wd) n for every coordinate."""
        return scaled_diagonal(mean, n, self.kappa * (self.s0 + self.train.weight_decay))

    def __call__(self, task: Task, cavity: Gaussian, start: Tensor, cohort: Cohort) -> Gaussian:
        """The mean by SGD, the precision by curvature."""
        mean = mean_of(samples(self.train, task, cavity, start, cohort))
        curvature = self.curvature(task, cavity, mean, cohort)
        return Gaussian.of(mean, self.kappa * cohort.n * (curvature + self.train.weight_decay) + cavity.lam)
