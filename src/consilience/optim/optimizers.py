"""Client optimisers. Their memory, such as momentum, is 0 at the start of each round."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from consilience.core.checks import Fraction, NonNegative, Positive
from consilience.core.ranges import Range, Ranges
from consilience.optim.chain import Chain, descend
from consilience.optim.turns import Memory, StepSize


@dataclass(frozen=True)
class SGD(Chain):
    """v ← ρ v + g, θ ← θ − lr · v."""

    momentum: Fraction = 0.0

    def memory(self, theta: Tensor) -> Memory:
        return (torch.zeros_like(theta),) if self.momentum else ()

    def move(self, theta: Tensor, memory: Memory, g: Tensor, n: Tensor, noise: Tensor | None, lr: StepSize) -> None:
        if memory:
            g = memory[0].mul_(self.momentum).add_(g)
        descend(theta, g, lr)


@dataclass(frozen=True)
class Adam(Chain):
    """m ← β₁ m + (1 − β₁) g, v ← β₂ v + (1 − β₂) g², θ ← θ − lr · m̂ / (√v̂ + eps) (Kingma & Ba, 2015).

    m̂ and v̂ are corrected for their start at a client's own step. g is the whole gradient: a prior and weight decay are
    scaled together with the loss, unlike in AdamW. `noise` is the standard deviation of Gaussian noise added to g.
    Some codes of Bayesian GANs do this (6e-4); it is not a sampler of a known distribution.
    """

    ranges: ClassVar[Ranges] = {"lr": Range(1e-5, 3e-2)}
    lr: NonNegative = 0.001
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: Positive = 1e-8
    noise: NonNegative = 0.0

    @property
    def noisy(self) -> bool:
        return self.noise > 0

    def memory(self, theta: Tensor) -> Memory:
        """m, v, and the number of steps t."""
        return torch.zeros_like(theta), torch.zeros_like(theta), _no_steps(theta)

    def move(self, theta: Tensor, memory: Memory, g: Tensor, n: Tensor, noise: Tensor | None, lr: StepSize) -> None:
        first, second, steps = memory
        if noise is not None:
            g.add_(noise, alpha=self.noise)
        rest = _moments(first, second, steps, g, self.beta1, self.beta2)
        _adam_step(theta, first, second, rest, g, lr, self.eps)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam whose weight decay is no part of the gradient: θ ← (1 − lr · weight_decay) θ − lr · m̂ / (√v̂ + eps)
    (Loshchilov & Hutter, 2019)."""

    weight_decay: NonNegative = 0.01

    @property
    def decay(self) -> float:
        return 0.0

    def move(self, theta: Tensor, memory: Memory, g: Tensor, n: Tensor, noise: Tensor | None, lr: StepSize) -> None:
        theta.mul_(1 - lr * self.weight_decay)
        super().move(theta, memory, g, n, noise, lr)


@dataclass(frozen=True)
class AMSGrad(Chain):
    """Adam with the largest v̂ so far in place of v̂ (Reddi et al., 2018)."""

    ranges: ClassVar[Ranges] = {"lr": Range(1e-4, 3e-2)}
    lr: NonNegative = 0.001
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: Positive = 1e-8

    def memory(self, theta: Tensor) -> Memory:
        """m, v, the largest v, and the number of steps t."""
        return torch.zeros_like(theta), torch.zeros_like(theta), torch.zeros_like(theta), _no_steps(theta)

    def move(self, theta: Tensor, memory: Memory, g: Tensor, n: Tensor, noise: Tensor | None, lr: StepSize) -> None:
        first, second, largest, steps = memory
        rest = _moments(first, second, steps, g, self.beta1, self.beta2)
        torch.maximum(largest, second, out=largest)
        _adam_step(theta, first, largest, rest, g, lr, self.eps)


@dataclass(frozen=True)
class RMSprop(Chain):
    """v ← α v + (1 − α) g², θ ← θ − lr · g / (√v + eps) (Hinton, 2012).

    v is not corrected for its start, so the first steps of a round are 1/√(1 − α) times as long as later ones."""

    ranges: ClassVar[Ranges] = {"lr": Range(1e-4, 3e-2)}
    lr: NonNegative = 0.01
    alpha: Fraction = 0.99
    eps: Positive = 1e-8

    def memory(self, theta: Tensor) -> Memory:
        return (torch.zeros_like(theta),)

    def move(self, theta: Tensor, memory: Memory, g: Tensor, n: Tensor, noise: Tensor | None, lr: StepSize) -> None:
        (second,) = memory
        second.mul_(self.alpha).addcmul_(g, g, value=1 - self.alpha)
        descend(theta, g.div_(second.sqrt().add_(self.eps)), lr)


def _no_steps(theta: Tensor) -> Tensor:
    """t [K, 1]: clients with more batches are further on. In float32, 1 − β₂ᵗ would lose digits."""
    return torch.zeros(len(theta), 1, dtype=torch.float64, device=theta.device)


def _moments(
    first: Tensor, second: Tensor, steps: Tensor, g: Tensor, beta1: float, beta2: float
) -> tuple[Tensor, Tensor]:
    """Update the running means of g and g² in place; return their corrections 1 − β₁ᵗ and 1 − β₂ᵗ. If `steps` has two
    columns, the means have seen different numbers of steps."""
    steps += 1
    first.lerp_(g, 1 - beta1)
    second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    return 1 - beta1 ** steps[:, :1], 1 - beta2 ** steps[:, -1:]


def _adam_step(
    theta: Tensor, first: Tensor, second: Tensor, rest: tuple[Tensor, Tensor], g: Tensor, lr: StepSize, eps: float
) -> None:
    """θ − lr · m̂ / (√v̂ + eps), in place. g is overwritten by the divisor (1 − β₁ᵗ)(√v̂ + eps) of m."""
    scale, floor = (rest[0] / rest[1].sqrt()).to(theta.dtype), (rest[0] * eps).to(theta.dtype)
    below = torch.sqrt(second, out=g).mul_(scale).add_(floor)
    if isinstance(lr, Tensor):
        theta.sub_(lr * first / below)
    else:
        theta.addcdiv_(first, below, value=-lr)
