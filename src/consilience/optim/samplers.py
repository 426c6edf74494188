"""Samplers: chains whose iterates are samples of exp(−n · objective / T) for small steps.

The objective is a mean over the client's n examples, so lr is n times the step size of the papers.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from consilience.core.checks import NonNegative, Share
from consilience.core.ranges import Range, Ranges
from consilience.optim.chain import Chain, descend
from consilience.optim.turns import Memory, StepSize


@dataclass(frozen=True)
class SGLD(Chain):
    """θ ← θ − lr · g + √(2 lr T / n) ξ (Welling & Teh, 2011)."""

    ranges: ClassVar[Ranges] = {"lr": Range(1e-4, 0.3)}
    temperature: NonNegative = 1.0

    @property
    def noisy(self) -> bool:
        return True

    def move(self, theta: Tensor, memory: Memory, g: Tensor, n: Tensor, noise: Tensor | None, lr: StepSize) -> None:
        assert noise is not None
        descend(theta, g, lr).add_((2 * lr * self.temperature / n).sqrt() * noise)


@dataclass(frozen=True)
class SGHMC(Chain):
    """v ← (1 − a) v − lr · g + √(2 a lr T / n) ξ, θ ← θ + v, with friction a (Chen et al., 2014). a = 1 is SGLD."""

    ranges: ClassVar[Ranges] = {"lr": Range(1e-5, 3e-2)}
    friction: Share = 0.1
    temperature: NonNegative = 1.0

    @property
    def noisy(self) -> bool:
        return True

    def memory(self, theta: Tensor) -> Memory:
        return (torch.zeros_like(theta),)

    def move(self, theta: Tensor, memory: Memory, g: Tensor, n: Tensor, noise: Tensor | None, lr: StepSize) -> None:
        (velocity,) = memory
        assert noise is not None
        push = (2 * self.friction * lr * self.temperature / n).sqrt() * noise
        theta.add_(descend(velocity.mul_(1 - self.friction), g, lr).add_(push))
