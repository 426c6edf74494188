"""Tilted inference: a Gaussian approximation of a client's likelihood times its cavity."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from consilience.core import ConfigError, Count, Gaussian, NonNegative, Positive, Range, Ranges, check_types
from consilience.data.cohort import Cohort
from consilience.optim import SGD, Chain
from consilience.tasks.task import Task


class Tilted(ABC):
    """A Gaussian q̂(θ) ≈ p(D_k | θ) q₋ₖ(θ) for every client of a cohort, from its data D_k and its cavity q₋ₖ."""

    letter: ClassVar[str]
    """The letter in the papers' tables: FedEP(I), FedEP(L), …"""
    starts_flat: ClassVar[bool] = False
    """Whether a site of unseen examples has no information."""

    @property
    def measures_precision(self) -> bool:
        """Whether the precision of a site is found from the client's data; otherwise its size is a constant."""
        return True

    def __post_init__(self) -> None:
        check_types(self)

    @abstractmethod
    def site(self, mean: Tensor, n: Tensor) -> Gaussian:
        """A factor of n unseen examples around `mean` [P], with the client axis of n [K, 1], or without for n [1]."""

    @abstractmethod
    def __call__(self, task: Task, cavity: Gaussian, start: Tensor, cohort: Cohort) -> Gaussian:
        """The tilted distribution of each client; chains begin at `start` [P]."""

    def near(self, task: Task, cavity: Gaussian, q: Gaussian, cohort: Cohort, power: float = 1.0) -> Gaussian:
        """(tilted distribution)^power of each client, found from the belief q [P]. An expectation in it, if it has one,
        is one under the result."""
        return self(task, cavity, q.mean, cohort) ** power

    def refinement(self, tilted: Gaussian, q: Gaussian) -> Gaussian:
        """tilted / q, the change that a client contributes to q."""
        return tilted / q


def samples(chain: Chain, task: Task, cavity: Gaussian, start: Tensor, cohort: Cohort) -> Iterator[Tensor]:
    """One sample [K, P] an epoch from a chain on the tilted energy −log p(D_k|θ) − log q₋ₖ(θ), scaled by 1/n. The chain
    overwrites one tensor."""
    return chain.iterates(
        chain.gradient(task), start, cohort, pace=task.pace, running=task.running, prior=cavity ** (1 / cohort.n)
    )


def mean_of(drawn: Iterator[Tensor]) -> Tensor:
    """The mean over samples [K, P]."""
    total, count = next(drawn).clone(), 1
    for sample in drawn:
        total, count = total.add_(sample), count + 1
    return total.div_(count)


def moments_of(drawn: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance over samples, by Welford's algorithm."""
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
    """N(mean, 1 / (scale · n)) with a precision for each coordinate, for precisions that will differ."""
    same = scaled_identity(mean, n, scale)
    return Gaussian(same.eta, same.lam.expand_as(same.eta).clone())


@dataclass(frozen=True)
class Identity(Tilted):
    """Scaled identity: Λ = c·n_k + Λ₋ₖ, the mean by a chain. Sites start at c·n_k, so the precision never changes and a
    message is P + 1 numbers. `scale` is c, the precision that an example adds."""

    letter: ClassVar[str] = "I"
    ranges: ClassVar[Ranges] = {"scale": Range(5e-3, 5.0)}
    train: Chain = SGD()
    scale: Positive = 0.05

    @property
    def measures_precision(self) -> bool:
        return False

    def site(self, mean: Tensor, n: Tensor) -> Gaussian:
        return scaled_identity(mean, n, self.scale)

    def __call__(self, task: Task, cavity: Gaussian, start: Tensor, cohort: Cohort) -> Gaussian:
        mean = mean_of(samples(self.train, task, cavity, start, cohort))
        return Gaussian.of(mean, cavity.lam + self.scale * cohort.n)

    def refinement(self, tilted: Gaussian, q: Gaussian) -> Gaussian:
        """tilted / q with a change of Λ that is exactly 0; an adaptive optimiser would amplify rounding."""
        delta = tilted / q
        return Gaussian(delta.eta, torch.zeros_like(delta.lam))


def within_two_deviations(value: Tensor) -> Tensor:
    """Every row's entries [K, P] clipped to the row's mean ± 2 standard deviations."""
    deviation, mean = torch.std_mean(value, dim=-1, correction=0, keepdim=True)
    return value.clamp(mean - 2 * deviation, mean + 2 * deviation)


@dataclass(frozen=True)
class Curved(Tilted):
    """Λ = κ n_k (F + wd) + Λ₋ₖ at the mean that SGD found; subclasses define the curvature F of an example's loss.

    κ = 1 is the likelihood itself; the papers take 500 for networks with many more weights than data. Sites start with
    F = s₀. `batch_size` is the number of examples whose gradients are in memory at once."""

    ranges: ClassVar[Ranges] = {"kappa": Range(1.0, 1000.0)}
    train: SGD = SGD()
    kappa: Positive = 500.0
    s0: NonNegative = 1e-4
    epochs: Count = 5
    batch_size: Count = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.s0 + self.train.weight_decay == 0:
            raise ConfigError("a site needs a positive initial precision: s0 or weight_decay must be above 0")

    @abstractmethod
    def curvature(self, task: Task, cavity: Gaussian, mean: Tensor, cohort: Cohort) -> Tensor:
        """F [K, P] ≥ 0."""

    def site(self, mean: Tensor, n: Tensor) -> Gaussian:
        return scaled_diagonal(mean, n, self.kappa * (self.s0 + self.train.weight_decay))

    def __call__(self, task: Task, cavity: Gaussian, start: Tensor, cohort: Cohort) -> Gaussian:
        mean = mean_of(samples(self.train, task, cavity, start, cohort))
        curvature = self.curvature(task, cavity, mean, cohort)
        return Gaussian.of(mean, self.kappa * cohort.n * (curvature + self.train.weight_decay) + cavity.lam)
