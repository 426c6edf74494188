"""IVON: a variational Gaussian for the price of Adam (Shen et al., 2024)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from consilience.core.checks import Fraction, NonNegative, Positive
from consilience.core.gaussian import Gaussian
from consilience.core.ranges import Range, Ranges
from consilience.optim.chain import BatchGradient, Chain, Now
from consilience.optim.turns import Memory, StepSize


@dataclass(frozen=True)
class IVON(Chain):
    """θ is the mean of N(θ, 1/(κ n (h + d))), which minimises E[κ n · loss] + KL to the prior. h is the curvature of
    the loss at a client with n examples, and d the precision of the prior and the weight decay, on the scale of the
    mean loss. With ε ~ N(0, 1) and g the gradient at θ + σε, σ² = 1/(κ n (h + d)):

    f = (h + d) σ κ n ε g, h ← β₂ h + (1 − β₂) f + ½ (1 − β₂)² (h − f)²/(h + d), which keeps h + d above 0;
    m ← β₁ m + (1 − β₁) g, θ ← θ − lr · (m̂ + the prior's gradient) / (h + d).

    `h0` is h at the start of a round. `kappa` is κ: 1 is the likelihood itself, more is a colder posterior. m̂ is
    corrected for its start, as in Adam. The prior's precision must be diagonal or scalar."""

    ranges: ClassVar[Ranges] = {"lr": Range(1e-3, 0.3)}
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    h0: Positive = 0.1
    kappa: Positive = 1.0
    lr: NonNegative = 0.1

    @property
    def noisy(self) -> bool:
        return True

    @property
    def preconditions(self) -> bool:
        return True

    def memory(self, theta: Tensor) -> Memory:
        """m, h, and the number of steps t [K, 1]: in float32, 1 − β₁ᵗ would lose digits."""
        steps = torch.zeros(len(theta), 1, dtype=torch.float64, device=theta.device)
        return torch.zeros_like(theta), torch.full_like(theta, self.h0), steps

    def probe(self, gradient: BatchGradient, theta: Tensor, now: Now) -> tuple[Tensor, Tensor]:
        """At one sample of the Gaussian."""
        precision = self.kappa * now.n * (now.memory[1] + self._held(now.prior))
        return gradient(theta + precision.rsqrt() * _of_weights(now.noise, now.running))

    def advance(
        self,
        theta: Tensor,
        g: Tensor,
        memory: Memory,
        prior: Gaussian | None,
        stiffness: Tensor | None,
        running: Tensor | None,
        n: Tensor,
        noise: Tensor | None,
        lr: StepSize,
    ) -> None:
        momentum, h, steps = memory
        averages = None if running is None else theta - running * g
        held = self._held(prior)
        found = g * _of_weights(noise, running) * (self.kappa * n * (h + held)).sqrt()
        new = 1 - self.beta2
        h.add_(new * (found - h) + (new**2 / 2) * (h - found).square() / (h + held))
        momentum.lerp_(g, 1 - self.beta1)
        steps += 1
        slope = momentum / (1 - self.beta1**steps).to(theta.dtype)
        slope = slope + held * theta if prior is None else prior.add_energy_gradient(slope, theta)
        theta.sub_(lr * slope / (h + held))
        if averages is not None and running is not None:
            theta.copy_(torch.where(running != 0, averages, theta))

    def move(self, theta: Tensor, memory: Memory, g: Tensor, n: Tensor, noise: Tensor | None, lr: StepSize) -> None:
        self.advance(theta, g, memory, None, None, None, n, noise, lr)

    def _held(self, prior: Gaussian | None) -> Tensor | float:
        """d, which includes the weight decay."""
        return self.weight_decay if prior is None else prior.lam


def _of_weights(noise: Tensor | None, running: Tensor | None) -> Tensor:
    """The noise, without that of running averages of BatchNorm layers, which have no posterior."""
    assert noise is not None
    return noise if running is None else noise * (running == 0)
