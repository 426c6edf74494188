"""Natural-parameter networks (Wang, Shi & Yeung, 2016): from a Gaussian to a Gaussian.

A layer takes the means and variances of independent units, `layer(mean, var)`, and returns those of its outputs as a
pair. Layers ignore correlations, which linear layers create.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

ZETA2 = math.pi / 8  # ζ²: Φ(ζx) ≈ σ(x)
ALPHA, BETA = 4 - 2 * math.sqrt(2), math.log(math.sqrt(2) - 1)  # σ(x)² ≈ σ(α(x + β))
FLOOR = 1e-6
Pair = tuple[Tensor, Tensor]


class GaussianLinear(nn.Module):
    """o_m = W x_m + b, o_s = (W∘W) x_s: exact for independent inputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(outputs, inputs)), nn.Parameter(torch.empty(outputs))
        bound = inputs**-0.5  # that of nn.Linear
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, mean: Tensor, var: Tensor) -> Pair:
        return F.linear(mean, self.weight, self.bias), F.linear(var, self.weight.square())


class Sigmoid(nn.Module):
    """a_m = σ(κ o_m) with κ = 1/√(1 + ζ²o_s), and a_s = E[σ²] − a_m², at least 1e-6.

    E[σ²] ≈ σ(α(o_m + β)/√(1 + ζ²α²o_s)), as in the papers, with an error of at most 0.027. As σ(α(x + β)) differs from
    σ(x)², a_s does not go to 0 with o_s."""

    def forward(self, mean: Tensor, var: Tensor) -> Pair:
        out = ((1 + ZETA2 * var).rsqrt() * mean).sigmoid()
        second = (ALPHA * (mean + BETA) * (1 + ZETA2 * ALPHA**2 * var).rsqrt()).sigmoid()
        return out, (second - out.square()).clamp_min(FLOOR)


class Tanh(nn.Module):
    """tanh x = 2σ(2x) − 1."""

    def __init__(self) -> None:
        super().__init__()
        self.sigmoid = Sigmoid()

    def forward(self, mean: Tensor, var: Tensor) -> Pair:
        out, spread = self.sigmoid(2 * mean, 4 * var)
        return 2 * out - 1, 4 * spread


class ReLU(nn.Module):
    """The exact moments of max(x, 0), with t = o_m/√o_s:

    a_m = o_m Φ(t) + √o_s φ(t), a_s = o_s [Φ(t) − |t| r − r²] with r = φ(t) − |t| Φ(−|t|), at least 1e-6.

    r is E[max(x, 0)]/√o_s on the side where it is small, so no large numbers cancel for either sign of t."""

    def forward(self, mean: Tensor, var: Tensor) -> Pair:
        var = var.clamp_min(FLOOR**2)
        deviation = var.sqrt()
        t = mean / deviation
        phi = (-t.square() / 2).exp() / math.sqrt(2 * math.pi)
        above = _ndtr(t)  # P(x > 0)
        r = phi - t.abs() * _ndtr(-t.abs())
        return mean * above + deviation * phi, (var * (above - t.abs() * r - r.square())).clamp_min(FLOOR)


def _ndtr(t: Tensor) -> Tensor:
    """Φ(t), accurate in the lower tail."""
    return torch.erfc(t * -math.sqrt(0.5)) / 2


class NPN(nn.Module):
    """Layers in sequence, each with a pair of inputs and a pair of outputs."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, mean: Tensor, var: Tensor) -> Pair:
        for layer in self.layers:
            mean, var = layer(mean, var)
        return mean, var


def npn(inputs: int, hidden: int, outputs: int, activation: nn.Module | None = None) -> NPN:
    """Linear, activation (`Sigmoid()` when None), linear: from a latent Gaussian to one over weights."""
    first, last = GaussianLinear(inputs, hidden), GaussianLinear(hidden, outputs)
    return NPN(first, Sigmoid() if activation is None else activation, last)
