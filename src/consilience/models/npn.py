"""Natural-parameter networks (Wang, Shi & Yeung, 2016): a Gaussian goes in, and a Gaussian comes out.

A layer takes the means and variances of independent units, `layer(mean, var)`, and returns those of its outputs as a
pair. No layer knows of correlations, which linear layers make and the next ones ignore.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from consilience.core.errors import check_word

ZETA2 = math.pi / 8  # ζ²: Φ(ζx) ≈ σ(x)
ALPHA, BETA = 4 - 2 * math.sqrt(2), math.log(math.sqrt(2) - 1)  # σ(x)² ≈ σ(α(x + β))
FLOOR = 1e-6
Pair = tuple[Tensor, Tensor]


class GaussianLinear(nn.Module):
    """o_m = W x_m + b, o_s = (W∘W) x_s: exact, as long as inputs are independent.

    With `variance` weights are Gaussian too, with variances V = softplus(ρ) of their own, and so is the bias:
    o_s = (W∘W) x_s + V (x_s + x_m∘x_m) + V_b.
    """

    def __init__(self, inputs: int, outputs: int, variance: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(outputs, inputs)), nn.Parameter(torch.empty(outputs))
        bound = inputs**-0.5  # that of nn.Linear
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -bound, bound)
        self.weight_rho = nn.Parameter(torch.full((outputs, inputs), -5.0)) if variance else None
        self.bias_rho = nn.Parameter(torch.full((outputs,), -5.0)) if variance else None

    def forward(self, mean: Tensor, var: Tensor) -> Pair:
        """Inputs [..., inputs] to outputs [..., outputs]."""
        out = F.linear(var, self.weight.square())
        if self.weight_rho is not None and self.bias_rho is not None:
            out = out + F.linear(var + mean.square(), F.softplus(self.weight_rho), F.softplus(self.bias_rho))
        return F.linear(mean, self.weight, self.bias), out


class Sigmoid(nn.Module):
    """a_m = σ(κ o_m) with κ = 1/√(1 + ζ²o_s), and a_s = E[σ²] − a_m², at least 1e-6. Two ways to E[σ²]:

    `powers`, the papers': E[σ²] ≈ σ(α(o_m + β)/√(1 + ζ²α²o_s)), wrong by 0.027 at most. What σ(α(x + β)) differs
    from σ(x)² stays when the input has no variance: a_s does not go to 0.
    `derivative`: σ² = σ − σ′ and E[σ′] = ∂a_m/∂o_m, so a_s = a_m (1 − a_m)(1 − κ), wrong by 0.013 at most. It goes to
    0 with o_s.
    """

    def __init__(self, how: Literal["powers", "derivative"] = "powers") -> None:
        super().__init__()
        check_word("how", how, ("powers", "derivative"))
        self.how = how

    def forward(self, mean: Tensor, var: Tensor) -> Pair:
        """Elementwise."""
        kappa = (1 + ZETA2 * var).rsqrt()
        out = (kappa * mean).sigmoid()
        if self.how == "derivative":
            # 1 − κ without cancellation: 1 − κ² = κ²ζ²o_s.
            spread = out * (-kappa * mean).sigmoid() * ZETA2 * var * kappa.square() / (1 + kappa)
        else:
            spread = (ALPHA * (mean + BETA) * (1 + ZETA2 * ALPHA**2 * var).rsqrt()).sigmoid() - out.square()
        return out, spread.clamp_min(FLOOR)


class Tanh(nn.Module):
    """tanh x = 2σ(2x) − 1."""

    def __init__(self, how: Literal["powers", "derivative"] = "powers") -> None:
        super().__init__()
        self.sigmoid = Sigmoid(how)

    def forward(self, mean: Tensor, var: Tensor) -> Pair:
        """Elementwise."""
        out, spread = self.sigmoid(2 * mean, 4 * var)
        return 2 * out - 1, 4 * spread


class ReLU(nn.Module):
    """The exact moments of max(x, 0), with t = o_m/√o_s:

    a_m = o_m Φ(t) + √o_s φ(t), a_s = o_s [Φ(t) − |t| r − r²] with r = φ(t) − |t| Φ(−|t|), at least 1e-6.

    r is E[max(x, 0)]/√o_s on the side where it is small: so nothing large cancels for either sign of t.
    """

    def forward(self, mean: Tensor, var: Tensor) -> Pair:
        """Elementwise."""
        var = var.clamp_min(FLOOR**2)
        deviation = var.sqrt()
        t = mean / deviation
        phi = (-t.square() / 2).exp() / math.sqrt(2 * math.pi)
        above = _ndtr(t)  # the chance of x > 0
        r = phi - t.abs() * _ndtr(-t.abs())
        return mean * above + deviation * phi, (var * (above - t.abs() * r - r.square())).clamp_min(FLOOR)


def _ndtr(t: Tensor) -> Tensor:
    """Φ(t), to the last digit in the lower tail too."""
    return torch.erfc(t * -math.sqrt(0.5)) / 2


class NPN(nn.Module):
    """Layers in a row, each with a pair of inputs and a pair of outputs."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, mean: Tensor, var: Tensor) -> Pair:
        """From the first layer to the last."""
        for layer in self.layers:
            mean, var = layer(mean, var)
        return mean, var


def npn(inputs: int, hidden: int, outputs: int, activation: nn.Module | None = None, variance: bool = False) -> NPN:
    """Linear, activation (`Sigmoid()` when None), linear: from a latent Gaussian to one over weights. With `variance`
    the network's own weights have variances."""
    first, last = GaussianLinear(inputs, hidden, variance), GaussianLinear(hidden, outputs, variance)
    return NPN(first, Sigmoid() if activation is None else activation, last)
