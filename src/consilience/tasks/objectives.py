"""Objectives of a GAN: the losses of discriminator and generator as functions of scores."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from consilience.core.checks import NonNegative, check_types


@dataclass(frozen=True)
class Objective(ABC):
    """Losses of each example's score d, which is higher the more the example looks like data. `penalty` λ adds
    λ (‖∂d/∂x‖ − 1)² between real and generated examples to the discriminator's loss (Gulrajani et al., 2017)."""

    penalty: NonNegative = 0.0

    def __post_init__(self) -> None:
        check_types(self)

    def excess(self, gradient: Tensor) -> Tensor:
        """(‖∂d/∂x‖ − 1)² of each example, from ∂d/∂x [B, ...]."""
        norm = (gradient.flatten(1).square().sum(1) + 1e-12).sqrt()
        return (norm - 1).square()

    @abstractmethod
    def real(self, d: Tensor) -> Tensor:
        """The discriminator's loss of a real example."""

    @abstractmethod
    def fake(self, d: Tensor) -> Tensor:
        """The discriminator's loss of a generated example."""

    @abstractmethod
    def generator(self, d: Tensor) -> Tensor:
        """The generator's loss of a generated example."""


@dataclass(frozen=True)
class Wasserstein(Objective):
    """−d(x) + d(G(z)) against −d(G(z)): WGAN-GP, with λ = 10."""

    penalty: NonNegative = 10.0

    def real(self, d: Tensor) -> Tensor:
        return -d

    def fake(self, d: Tensor) -> Tensor:
        return d

    def generator(self, d: Tensor) -> Tensor:
        return -d


@dataclass(frozen=True)
class LeastSquares(Objective):
    """(d(x) − 1)² + d(G(z))² against (d(G(z)) − 1)²: LS-GAN (Mao et al., 2017)."""

    def real(self, d: Tensor) -> Tensor:
        return (d - 1).square()

    def fake(self, d: Tensor) -> Tensor:
        return d.square()

    def generator(self, d: Tensor) -> Tensor:
        return (d - 1).square()
