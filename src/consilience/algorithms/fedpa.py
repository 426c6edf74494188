"""FedPA: posterior averaging, the product of what clients believe on their own (Al-Shedivat et al., 2021)."""

from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.averaging import Averaging
from consilience.algorithms.shared.factors import Factors
from consilience.core import ConfigError, Gaussian, NonNegative, Point, Range, Ranges, Size, Weighted
from consilience.data.cohort import Cohort
from consilience.optim import SGD, Chain, epoch_means
from consilience.tasks.task import Task


@algorithm
class FedPA(Averaging):
    """w ← w + optimiser(Σ p_k Σ̂_k⁻¹ (μ̂_k − w)), whose fixed point is the mean of Π_k N(μ̂_k, Σ̂_k).

    A sample is the mean of an epoch's iterates, after `burn_in` epochs; with ℓ samples μ̂ is their mean and
    Σ̂ = ρ_ℓ·1 + (1 − ρ_ℓ) S with ρ_ℓ = 1/(1 + (ℓ − 1)ρ) and S their covariance. One sample gives FedAvg. `diagonal`
    keeps only the variances of S."""

    ranges: ClassVar[Ranges] = {"rho": Range(1e-3, 1.0)}
    train: Chain = SGD(epochs=5)
    rho: NonNegative = 0.01
    burn_in: Size = 0
    diagonal: bool = False

    def __post_init__(self) -> None:
        if self.burn_in >= self.train.passes:
            passes = "1, as they are mixed" if self.train.mixed else self.train.epochs
            raise ConfigError(f"burn_in must be below epochs ({passes}), got {self.burn_in}")

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        start = message.theta
        means = epoch_means(self.train, task, start, cohort, burn_in=self.burn_in)
        samples = torch.stack([sample.clone() for epoch, sample in enumerate(means) if epoch >= self.burn_in], 1)
        mean = samples.mean(1)
        precise = by_variances if self.diagonal else by_covariance
        delta = precise(samples - mean.unsqueeze(1), mean - start, self.rho)
        return Weighted.of(Point(delta), cohort.n), None


def by_covariance(off: Tensor, v: Tensor, rho: float) -> Tensor:
    """Σ̂⁻¹ v in O(ℓ² P), from centred samples X [K, ℓ, P]. As 1 − ρ_ℓ = (ℓ − 1) ρ ρ_ℓ, Σ̂ = ρ_ℓ (1 + ρ XᵀX), so by
    Woodbury Σ̂⁻¹ v = (v − ρ Xᵀ(1 + ρ XXᵀ)⁻¹ X v) / ρ_ℓ: the same as the paper's ℓ rank-one updates."""
    count = off.shape[1]
    gram = rho * off @ off.mT + torch.eye(count, dtype=off.dtype, device=off.device)
    # A client with NaN gets NaN back and is rejected by name; a solver that raises would end the round for all.
    inner: Tensor = torch.linalg.solve_ex(gram, off @ v.unsqueeze(-1)).result
    return (v - rho * (off.mT @ inner).squeeze(-1)) * (1 + (count - 1) * rho)


def by_variances(off: Tensor, v: Tensor, rho: float) -> Tensor:
    """Σ̂⁻¹ v with the diagonal of the same Σ̂."""
    return v * (1 + (off.shape[1] - 1) * rho) / (1 + rho * off.square().sum(1))


@algorithm
class FedPADiagonal(Factors):
    """FedPA in natural parameters: cavity ∝ 1, so each client infers alone, with any diagonal inference, and q's mean
    is (Σ Λ_k)⁻¹ Σ Λ_k μ_k after one round. Its precision is the mean of the Λ_k, 1/K of the product's."""

    def __post_init__(self) -> None:
        if self.prior:
            raise ConfigError(f"clients that infer alone have no common prior: prior must be 0, got {self.prior}")

    @property
    def name(self) -> str:
        return f"FedPA({self.infer.letter})"

    def cavity(self, q: Gaussian, state: None, share: Tensor) -> Gaussian:
        return Gaussian.flat(q.eta.expand(len(share), -1))

    def local(self, task: Task, message: Gaussian, state: None, cohort: Cohort) -> tuple[Gaussian, None]:
        q = message
        tilted = self.infer.near(task, self.cavity(q, state, cohort.share), q, cohort)
        return self.damped(tilted / q, cohort), None
