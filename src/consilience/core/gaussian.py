"""Gaussian in natural parameters: products add, quotients subtract, powers scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from consilience.core import guards, keys
from consilience.core.display import span
from consilience.core.records import record, shape

FLOOR = 1e-8


@record
class Gaussian:
    """N(θ; Λ⁻¹η, Λ⁻¹) ∝ exp(ηᵀθ − ½ θᵀΛθ), with η = `eta` [..., P] and Λ = `lam`.

    `lam` is [..., P] (diagonal), [..., 1] (a scalar for all coordinates) or, with one dimension more than
    `eta`, [..., P, P] (full, for small P). Leading axes are clients and broadcast.

    A factor may be improper: zero or negative precision removes information. Moments need Λ > 0, so they
    are those of `proper()`, which raises precisions below `FLOOR`, keeps η, and counts the raised entries as "precision
    floor". For a full Λ these are eigenvalues, and the floor is at least the rounding error.
    """

    eta: Tensor
    lam: Tensor

    @classmethod
    def of(cls, mean: Tensor, precision: Tensor) -> Gaussian:
        """From a mean and a precision (diagonal, scalar or full)."""
        full = precision.dim() == mean.dim() + 1
        return cls((precision @ mean.unsqueeze(-1)).squeeze(-1) if full else precision * mean, precision)

    @classmethod
    def flat(cls, like: Tensor) -> Gaussian:
        """The factor 1: no information, with the shape of `like` and a scalar precision."""
        return cls(torch.zeros_like(like), like.new_zeros(*like.shape[:-1], 1))

    @property
    def full(self) -> bool:
        """True if Λ is a matrix."""
        return self.lam.dim() == self.eta.dim() + 1

    def __repr__(self) -> str:
        one = self.lam.shape[-1] == 1 < self.eta.shape[-1]
        kind = "full" if self.full else "scalar" if one else "diagonal"
        lam = self.lam.diagonal(dim1=-2, dim2=-1) if self.full else self.lam
        return f"Gaussian({shape(self.eta)}, {kind} precision {span(lam) or '…'})"

    def _combine(self, other: Gaussian, sign: int) -> Gaussian:
        a, b = self.lam, other.lam
        if self.full != other.full:
            a, b = (g.lam if g.full else torch.diag_embed(g.lam.expand_as(g.eta)) for g in (self, other))
        return Gaussian(torch.add(self.eta, other.eta, alpha=sign), torch.add(a, b, alpha=sign))

    def __mul__(self, other: Gaussian) -> Gaussian:
        return self._combine(other, 1)

    def __truediv__(self, other: Gaussian) -> Gaussian:
        return self._combine(other, -1)

    def __pow__(self, power: float | Tensor) -> Gaussian:
        """Power by a number or by one number a client, [K, 1]."""
        scale = power.unsqueeze(-1) if isinstance(power, Tensor) and self.full and power.dim() else power
        return Gaussian(self.eta * power, self.lam * scale)

    @property
    def norm(self) -> Tensor:
        """The Euclidean norm of all natural parameters together, [..., 1]."""
        squares = self.eta.square().sum(-1, keepdim=True)
        lam = self.lam.flatten(-2) if self.full else self.lam
        return (squares + lam.square().sum(-1, keepdim=True)).sqrt()

    def clip(self, bound: float) -> Gaussian:
        """The factor, scaled to a norm of at most `bound`; the clipped clients are counted."""
        norm = self.norm
        guards.count("update clipped", norm > bound)
        return self ** (bound / norm.clamp_min(bound))

    def product(self, weight: Tensor | None = None) -> Gaussian:
        """Π_k q_k^(w_k) over the client axis, w [K, 1]; all ones when None."""
        factors = self if weight is None else self**weight
        eta, lam = factors.eta, factors.lam
        return Gaussian(eta.sum(0), lam.expand(*eta.shape[:-1], *lam.shape[-1 - factors.full :]).sum(0))

    def first(self, k: int) -> Gaussian:
        """The first k clients; a part without a client axis is shared and stays."""
        own = 1 + self.full
        eta = self.eta[:k] if self.eta.dim() > 1 else self.eta
        return Gaussian(eta, self.lam[:k] if self.lam.dim() > own else self.lam)

    def energy_gradient(self, theta: Tensor) -> Tensor:
        """Λθ − η: the gradient of the energy ½θᵀΛθ − ηᵀθ. Λ may be improper."""
        scaled = (self.lam @ theta.unsqueeze(-1)).squeeze(-1) if self.full else self.lam * theta
        return scaled - self.eta

    def add_energy_gradient(self, gradient: Tensor, theta: Tensor) -> Tensor:
        """`gradient` + Λθ − η, with fewer passes over memory than by `energy_gradient`."""
        if self.full:
            return gradient + self.energy_gradient(theta)
        return torch.addcmul(gradient, theta, self.lam).sub_(self.eta)

    def proper(self, floor: float = FLOOR) -> Gaussian:
        """The factor with every precision at least `floor`; the raised entries are counted."""
        if not self.full:
            guards.count("precision floor", self.lam < floor)
            return Gaussian(self.eta, self.lam.clamp_min(floor))
        values, vectors, rounding = self.spectrum()
        least = rounding.clamp_min(floor)
        guards.count("precision floor", values < least)
        if bool((values >= least).all()):
            return self
        return Gaussian(self.eta, (vectors * values.maximum(least).unsqueeze(-2)) @ vectors.mT)

    def informative(self) -> Gaussian:
        """The factor with η = Λ = 0 wherever its precision is negative; these entries are counted. As a term of an
        energy, η without Λ would be a force without bound."""
        if not self.full:
            lost = self.lam < 0
            guards.count("cavity without precision", lost)
            return Gaussian(self.eta.masked_fill(lost, 0), self.lam.masked_fill(lost, 0))
        values, vectors, rounding = self.spectrum()
        kept = values >= -rounding
        guards.count("cavity without precision", ~kept)
        if bool(kept.all()):
            return self
        held = vectors * kept.unsqueeze(-2)
        eta = (held @ (held.mT @ self.eta.unsqueeze(-1))).squeeze(-1)
        return Gaussian(eta, (held * values.unsqueeze(-2)) @ held.mT)

    def widened(self, variance: Tensor) -> Gaussian:
        """∫ factor(θ) N(θ; μ, T) dθ as a factor of μ, with T = diag(`variance`) [1] or [P]: ((1 + ΛT)⁻¹η, (1 + ΛT)⁻¹Λ).

        N(m, V) becomes N(m, V + T). A flat factor stays flat, T = 0 changes no bit, and T → ∞ gives a flat factor. The
        integral needs 1 + ΛT > 0: negative precisions below −½/T are raised to it and counted."""
        if not self.full:
            low = -0.5 / variance
            guards.count("precision too negative to widen", self.lam < low)
            lam = self.lam.maximum(low)
            kept = 1 / (1 + lam * variance)
            return Gaussian(self.eta * kept, lam * kept)
        lam = self._above(float(-0.5 / variance.max()))
        unit = torch.eye(lam.shape[-1], dtype=lam.dtype, device=lam.device)
        both = torch.cat([self.eta.unsqueeze(-1), lam], -1)
        solved = torch.linalg.solve_ex(unit + lam * variance, both).result
        eta, lam = solved[..., 0], solved[..., 1:]
        return Gaussian(eta, (lam + lam.mT) / 2)

    def _above(self, low: float) -> Tensor:
        """A full Λ whose eigenvalues below `low` are raised to it and counted."""
        values, vectors, _ = self.spectrum()
        guards.count("precision too negative to widen", values < low)
        if not bool((values < low).any()):
            return self.lam
        return (vectors * values.clamp_min(low).unsqueeze(-2)) @ vectors.mT

    def spectrum(self) -> tuple[Tensor, Tensor, Tensor]:
        """Eigenvalues and eigenvectors of a full Λ, and the rounding error of an eigenvalue, [..., 1]."""
        # eigh raises on NaN, which would end the round of all clients: the client gets NaN, and its update is rejected.
        fine = self.lam.isfinite().all(-1).all(-1)[..., None]
        unit = torch.eye(self.lam.shape[-1], dtype=self.lam.dtype, device=self.lam.device)
        values, vectors = torch.linalg.eigh(torch.where(fine.unsqueeze(-1), self.lam, unit))
        values = torch.where(fine, values, torch.nan)
        return values, vectors, values[..., -1:].abs() * (4 * values.shape[-1] * torch.finfo(values.dtype).eps)

    @property
    def mean(self) -> Tensor:
        """Λ⁻¹η."""
        return self.proper()._mean()

    @property
    def variance(self) -> Tensor:
        """The variance of every coordinate, [..., P]: the diagonal of Λ⁻¹."""
        q = self.proper()
        if q.full:
            return torch.cholesky_inverse(q._root()).diagonal(dim1=-2, dim2=-1)
        return (1 / q.lam).expand_as(q.eta)

    def _root(self) -> Tensor:
        root: Tensor = torch.linalg.cholesky_ex(self.lam).L  # Λ is proper or NaN: no check is needed
        return root

    def _mean(self) -> Tensor:
        if self.full:
            return torch.cholesky_solve(self.eta.unsqueeze(-1), self._root()).squeeze(-1)
        return self.eta / self.lam

    def _logdet(self) -> Tensor:
        if self.full:
            return 2 * self._root().diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return self.lam.log().expand_as(self.eta).sum(-1)

    def entropy(self) -> Tensor:
        """½[P(1 + ln 2π) − ln|Λ|], in nats, [...]."""
        return 0.5 * (self.eta.shape[-1] * (1 + math.log(2 * math.pi)) - self.proper()._logdet())

    def log_prob(self, theta: Tensor) -> Tensor:
        """ln N(θ), normalised, [...]."""
        q = self.proper()
        mahalanobis = ((theta - q._mean()) * q.energy_gradient(theta)).sum(-1)
        return 0.5 * (q._logdet() - self.eta.shape[-1] * math.log(2 * math.pi) - mahalanobis)

    def kl(self, other: Gaussian) -> Tensor:
        """KL(self ‖ other) = ½[tr(Λ_o Λ⁻¹) − P + (μ_o − μ)ᵀΛ_o(μ_o − μ) + ln|Λ| − ln|Λ_o|], [...]."""
        q, p = self.proper(), other.proper()
        off = q._mean() - p._mean()
        if q.full or p.full:
            q, p = (g if g.full else Gaussian(g.eta, torch.diag_embed(g.lam.expand_as(g.eta))) for g in (q, p))
            trace = (torch.cholesky_inverse(q._root()) * p.lam).sum((-2, -1))
        else:
            trace = (p.lam / q.lam).expand_as(off).sum(-1)
        distance = (off * Gaussian(torch.zeros_like(p.eta), p.lam).energy_gradient(off)).sum(-1)
        return 0.5 * (trace - self.eta.shape[-1] + distance + q._logdet() - p._logdet())

    def sample(self, n: int, *, seed: int = 0) -> Tensor:
        """[n, ..., P] draws; draw i depends on (seed, i) alone."""
        q = self.proper()
        key = keys.key(seed, purpose="sample", client=torch.arange(n))
        noise = keys.normal(key, *self.eta.shape, dtype=self.eta.dtype, device=self.eta.device)
        if not q.full:
            return q._mean() + noise * q.lam.rsqrt()
        # Λ = LLᵀ, so L⁻ᵀ z has covariance Λ⁻¹.
        spread: Tensor = torch.linalg.solve_triangular(q._root().mT, noise.unsqueeze(-1), upper=True)
        return q._mean() + spread.squeeze(-1)
