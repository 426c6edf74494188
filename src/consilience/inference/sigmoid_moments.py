"""A Gaussian times a sigmoid: the mean and variance of σ(f z) N(z; m, s) / Z, and the Gaussian factor tilted / cavity.

With Z(m) = E[σ(f z)] under the cavity N(m, s), both moments are derivatives of log Z:

    mean = m + s a        a = ∂ log Z/∂m
    var = s (1 − u)       u = −s ∂² log Z/∂m²     the share of the variance that is lost

The factor tilted / cavity follows without a difference of large numbers:

    precision = u / ((1 − u) s)        precision · mean = (a + m u/s) / (1 − u)

Z has no closed form. An approximation is an elementwise function (f, m, s) → (a, u), in which f broadcasts over z. The
true u lies in [0, 1), because σ is log-concave.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from consilience.core.gaussian import Gaussian

ZETA2 = math.pi / 8  # ζ²: Φ(ζx) ≈ σ(x), with the same derivative at 0


def derivative(f: Tensor, m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Z ≈ σ(g m) with g = f/√(1 + ζ²f²s), which does not depend on m; then both derivatives follow:

    a = g (1 − p) and u = s g² p(1 − p), with p = σ(g m).

    0 ≤ u < 2/π, which is exact in the limit of a step at m (half a Gaussian remains). So the variance is at least
    0.36 s, and the factor's precision at least 0."""
    g = f * (1 + ZETA2 * f.square() * s).rsqrt()
    p, rest = (g * m).sigmoid(), (-g * m).sigmoid()
    return g * rest, s * g.square() * p * rest


Approximation = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def sigmoid_moments(f: Tensor, mean: Tensor, var: Tensor, *, by: Approximation = derivative) -> tuple[Tensor, Tensor]:
    """The mean and variance of σ(f z) N(z; mean, var) / Z."""
    a, u = by(f, mean, var)
    return mean + var * a, var * (1 - u)


def sigmoid_site(f: Tensor, cavity: Gaussian, *, by: Approximation = derivative) -> Gaussian:
    """The Gaussian factor that approximates σ(f z) beside a cavity with a diagonal precision: tilted / cavity."""
    mean, var = cavity.mean, cavity.variance
    a, u = by(f, mean, var)
    kept = 1 - u
    return Gaussian((a + mean * u / var) / kept, u / (kept * var))


def quadrature(f: Tensor, m: Tensor, s: Tensor, nodes: int = 96, reach: float = 8.0) -> tuple[Tensor, Tensor]:
    """The trapezoidal rule in z = m + t√s, over ± `reach` around an estimate of t's mean: a = E[t]/√s, u = 1 − Var[t].

    A reference that costs `nodes` times as much. Gauss–Hermite rules converge badly, because σ has poles at ±iπ. The
    error of Var[t] is below 1e-6 for |f|√s ≤ 6, and 1e-3 for 19."""
    f, m, s = f.unsqueeze(-1), m.unsqueeze(-1), s.unsqueeze(-1)
    root, side = s.sqrt(), f.sign()
    # σ(f z) moves the mean by f(1 − p) at most, and no further than a little beyond the step at z = 0.
    by_gradient = f.abs() * root * (-f * m * (1 + ZETA2 * f.square() * s).rsqrt()).sigmoid()
    centre = side * torch.minimum(by_gradient, (-side * m / root).relu() + 1)
    t = centre.detach() + torch.linspace(-reach, reach, nodes, dtype=s.dtype, device=s.device)
    weight = (logsigmoid(f * m + f * root * t) - t.square() / 2).softmax(-1)
    mean = (weight * t).sum(-1, keepdim=True)
    return (mean / root).squeeze(-1), 1 - (weight * (t - mean).square()).sum(-1)
