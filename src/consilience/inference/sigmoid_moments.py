"""A Gaussian meets a sigmoid: the mean and variance of σ(f z) N(z; m, s) / Z, and the factor that led there.

With Z(m) = E[σ(f z)] under the cavity N(m, s), both moments are derivatives of log Z:

    mean = m + s a        a = ∂ log Z/∂m          the pull
    var = s (1 − u)       u = −s ∂² log Z/∂m²     the share of the variance that is lost

and what the sigmoid says, as a Gaussian factor tilted / cavity, needs no difference of large numbers:

    precision = u / ((1 − u) s)        precision · mean = (a + m u/s) / (1 − u)

Z has no closed form. A way to approximate it is a function (f, m, s) → (a, u), elementwise; f is a real number for
every z or for many. The true u lies in [0, 1): σ is log-concave.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from consilience.core.errors import check_word
from consilience.core.gaussian import Gaussian

How = Literal["derivative", "corrected", "printed", "quadrature"]
Way = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
ZETA2 = math.pi / 8  # ζ²: Φ(ζx) ≈ σ(x), with the same slope at 0


def sigmoid_moments(f: Tensor, mean: Tensor, var: Tensor, how: How = "derivative") -> tuple[Tensor, Tensor]:
    """Mean and variance of z ~ N(mean, var) after it has met σ(f z)."""
    pull, lost = _way(how)(f, mean, var)
    return mean + var * pull, var * (1 - lost)


def sigmoid_site(f: Tensor, cavity: Gaussian, how: How = "derivative") -> Gaussian:
    """The Gaussian factor that stands for σ(f z) beside a cavity without correlations: tilted / cavity."""
    mean, var = cavity.mean, cavity.variance
    pull, lost = _way(how)(f, mean, var)
    kept = 1 - lost
    return Gaussian((pull + mean * lost / var) / kept, lost / (kept * var))


def derivative(f: Tensor, m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Z ≈ σ(g m) with g = f/√(1 + ζ²f²s), which does not depend on m; then both derivatives follow:

    a = g (1 − p) and u = s g² p(1 − p), with p = σ(g m).

    0 ≤ u < 2/π, which is right in the limit of a step at m (half a Gaussian is left). So the variance is never below
    0.36 s, and the factor's precision never below 0.
    """
    g = f * (1 + ZETA2 * f.square() * s).rsqrt()
    p, rest = (g * m).sigmoid(), (-g * m).sigmoid()
    return g * rest, s * g.square() * p * rest


def corrected(f: Tensor, m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """By Stein's lemma, with r_d = E[σ^d]/E[σ]: a = f (1 − r₂) and u = f² s (r₂ + r₂² − 2r₃).

    The way of the FedNP paper, with its formulas put right. f²s multiplies what r₂ and r₃ have of error: where it is
    large, u can exceed 1, and the variance is negative.
    """
    log_r2, log_r3 = (_log_power(f, m, s, *_power(d)) - _log_power(f, m, s, *_power(1)) for d in (2, 3))
    r2, r3 = log_r2.exp(), log_r3.exp()
    return -f * log_r2.expm1(), f.square() * s * (r2 + r2.square() - 2 * r3)


def printed(f: Tensor, m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The FedNP paper as it stands, for study; in C = f z ~ N(C_m, C_s):

    S₁ = [C_m + C_s(1 − r₂)]/f, S₂ = [(C_m + 2C_s) r₂ − 2C_s r₃]/f², var = S₂ − S₁².

    S₂ is E[Cσ²] where E[C²σ] was meant, b of d = 2 and a of d = 3 are misprinted, and f = 0 has no answer.
    """
    log_z = _log_power(f, m, s, *_power(1))
    r2 = (_log_power(f, m, s, 4 - 2 * math.sqrt(2), math.log(math.sqrt(2) + 1)) - log_z).exp()
    r3 = (_log_power(f, m, s, 6 * (1 - 1 / math.sqrt(2)), math.log(2 ** (1 / 3) - 1)) - log_z).exp()
    c_m, c_s = f * m, f.square() * s
    s1 = (c_m + c_s * (1 - r2)) / f
    s2 = ((c_m + 2 * c_s) * r2 - 2 * c_s * r3) / f.square()
    return (s1 - m) / s, 1 - (s2 - s1.square()) / s


def quadrature(f: Tensor, m: Tensor, s: Tensor, nodes: int = 96, reach: float = 8.0) -> tuple[Tensor, Tensor]:
    """Trapezoids in z = m + t√s, over ± `reach` around about where t ends up: a = E[t]/√s and u = 1 − Var[t].

    A reference, `nodes` times as dear. σ has poles at ±iπ, which Gauss–Hermite rules do not forgive and trapezoids
    do while they are finer than the sigmoid's step: the error of Var[t] is below 1e-6 for |f|√s ≤ 6, 1e-3 for 19.
    """
    f, m, s = f.unsqueeze(-1), m.unsqueeze(-1), s.unsqueeze(-1)
    root, side = s.sqrt(), f.sign()
    # σ(f z) pulls by f(1 − p) at most, and no further than a little beyond the step at z = 0.
    by_slope = f.abs() * root * (-f * m * (1 + ZETA2 * f.square() * s).rsqrt()).sigmoid()
    centre = side * torch.minimum(by_slope, (-side * m / root).relu() + 1)
    t = centre.detach() + torch.linspace(-reach, reach, nodes, dtype=s.dtype, device=s.device)
    weight = (logsigmoid(f * m + f * root * t) - t.square() / 2).softmax(-1)
    mean = (weight * t).sum(-1, keepdim=True)
    return (mean / root).squeeze(-1), 1 - (weight * (t - mean).square()).sum(-1)


WAYS: dict[How, Way] = dict(zip(get_args(How), (derivative, corrected, printed, quadrature), strict=True))


def _way(how: How) -> Way:
    check_word("how", how, WAYS)
    return WAYS[how]


def _power(d: int) -> tuple[float, float]:
    """a and b for which σ(x)^d ≈ σ(a(x + b)): same slope where both are ½."""
    return 2 * d * (1 - 2 ** (-1 / d)), math.log(2 ** (1 / d) - 1)


def _log_power(f: Tensor, m: Tensor, s: Tensor, a: float, b: float) -> Tensor:
    """log E[σ(a(f z + b))] ≈ log σ(a(f m + b)/√(1 + ζ²a²f²s))."""
    return logsigmoid(a * (f * m + b) * (1 + ZETA2 * a**2 * f.square() * s).rsqrt())
