"""FedPA: posterior averaging, the product of what clients believe on their own (Al-Shedivat et al., 2021)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.shared.averaging import Server as Averaged
from consilience.algorithms.shared.averaging import continued
from consilience.algorithms.shared.factors import Factors
from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.core.ranges import Range, Ranges
from consilience.core.records import Point, Weighted
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGD, Chain, epoch_means
from consilience.server.optimizers import Momentum, ServerOptimizer
from consilience.tasks.task import Task


@algorithm
class FedPA(Algorithm):
    """w ← w + optimiser(Σ p_k Σ̂_k⁻¹ (μ̂_k − w)), whose fixed point is the mean of Π_k N(μ̂_k, Σ̂_k).

    A sample is the mean of an epoch's iterates, after `burn_in` epochs; with ℓ samples μ̂ is their mean and
    Σ̂ = ρ_ℓ·1 + (1 − ρ_ℓ) S with ρ_ℓ = 1/(1 + (ℓ − 1)ρ) and S their covariance. One sample gives FedAvg. `diagonal`
    keeps only the variances of S.
    """

    ranges: ClassVar[Ranges] = {"rho": Range(1e-3, 1.0)}
    train: Chain = SGD(epochs=5)
    server: ServerOptimizer = Momentum()
    rho: float = 0.01
    burn_in: int = 0
    diagonal: bool = False

    def __post_init__(self) -> None:
        if not self.rho >= 0 or not 0 <= self.burn_in < self.train.epochs:
            raise ConfigError(
                f"rho must not be negative and burn_in below epochs ({self.train.epochs}), "
                f"got {self.rho} and {self.burn_in}"
            )

    def start(self, task: Task, info: Info) -> Averaged:
        """Everyone begins with the module's own weights."""
        return continued(info, self.server)

    def message(self, server: Averaged, ids: object) -> Point:
        """The global weights."""
        return server.model

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        """Sample; send n_k Σ̂⁻¹ (μ̂ − w)."""
        start = message.theta
        iterates = epoch_means(self.train, task, start, cohort, burn_in=self.burn_in)
        samples = torch.stack([sample.clone() for epoch, sample in enumerate(iterates) if epoch >= self.burn_in], 1)
        mean = samples.mean(1)
        precise = by_variances if self.diagonal else by_covariance
        delta = precise(samples - mean.unsqueeze(1), mean - start, self.rho)
        return Weighted.of(Point(delta), cohort.n), None

    def fuse(self, server: Averaged, update: Weighted) -> Averaged:
        """A server step along the mean of the precision-weighted changes."""
        return Averaged(*self.server.step(server.model, update.mean, server.memory))

    def posterior(self, server: Averaged) -> Point:
        """A point: clients' precisions are used up in their updates."""
        return server.model


def by_covariance(off: Tensor, v: Tensor, rho: float) -> Tensor:
    """Σ̂⁻¹ v in O(ℓ² P), from centred samples X [K, ℓ, P]. As 1 − ρ_ℓ = (ℓ − 1) ρ ρ_ℓ, Σ̂ = ρ_ℓ (1 + ρ XᵀX), so by
    Woodbury Σ̂⁻¹ v = (v − ρ Xᵀ(1 + ρ XXᵀ)⁻¹ X v) / ρ_ℓ: the same as the paper's ℓ rank-one updates."""
    count = off.shape[1]
    gram = rho * off @ off.mT + torch.eye(count, dtype=off.dtype, device=off.device)
    # A client with NaN gets NaN back, and is named; a solver that raises would end the round for all.
    inner: Tensor = torch.linalg.solve_ex(gram, off @ v.unsqueeze(-1)).result
    return (v - rho * (off.mT @ inner).squeeze(-1)) * (1 + (count - 1) * rho)


def by_variances(off: Tensor, v: Tensor, rho: float) -> Tensor:
    """Σ̂⁻¹ v with the diagonal of the same Σ̂."""
    return v * (1 + (off.shape[1] - 1) * rho) / (1 + rho * off.square().sum(1))


@algorithm
class FedPADiagonal(Factors):
    """The same idea in natural parameters: cavity ∝ 1, so each client infers alone, with any diagonal inference, and
    q's mean is (Σ Λ_k)⁻¹ Σ Λ_k μ_k after one round. Its precision is the mean of the Λ_k, 1/K of the product's."""

    def __post_init__(self) -> None:
        if self.prior:
            raise ConfigError(f"clients who infer alone have no common prior: prior must be 0, got {self.prior}")

    @property
    def name(self) -> str:
        """With the letter of the inference."""
        return f"FedPA({self.infer.letter})"

    def local(self, task: Task, message: Gaussian, state: None, cohort: Cohort) -> tuple[Gaussian, None]:
        """Cavity 1, tilted, Δ."""
        alone = Gaussian.flat(message.eta.expand(len(cohort), -1))
        return self.damped(self.infer(task, alone, message.mean, cohort) / message, cohort), None
