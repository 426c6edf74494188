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

    Factors need not be proper: a site may have zero or negative precision, and that is how information is taken
    out again. Only moments need Λ > 0. One policy, `proper`: precisions below `FLOOR` are raised to it, η stays,
    and the number of raised entries is counted as "precision floor". For a full Λ these are eigenvalues, and the
    floor is at least what rounding can tell from zero.
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
        """Whether Λ is a matrix."""
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
    def length(self) -> Tensor:
        """The Euclidean length of all natural parameters together, [..., 1]."""
        squares = self.eta.square().sum(-1, keepdim=True)
        lam = self.lam.flatten(-2) if self.full else self.lam
        return (squares + lam.square().sum(-1, keepdim=True)).sqrt()

    def clip(self, longest: float) -> Gaussian:
        """The factor to the power that makes it no longer than `longest`; the clients clipped are counted."""
        length = self.length
        guards.count("update clipped", length > longest)
        return self ** (longest / length.clamp_min(longest))

    def product(self, weight: Tensor | None = None) -> Gaussian:
        """Π_k q_k^(w_k) over the client axis, w [K, 1]; all ones when None."""
        factors = self if weight is None else self**weight
        eta, lam = factors.eta, factors.lam
        return Gaussian(eta.sum(0), lam.expand(*eta.shape[:-1], *lam.shape[-1 - factors.full :]).sum(0))

    def first(self, k: int) -> Gaussian:
        """The first k clients; parts without a client axis are shared and stay."""
        own = 1 + self.full
        eta = self.eta[:k] if self.eta.dim() > 1 else self.eta
        return Gaussian(eta, self.lam[:k] if self.lam.dim() > own else self.lam)

    def slope(self, theta: Tensor) -> Tensor:
        """Λθ − η: the gradient of the energy ½θᵀΛθ − ηᵀθ. Needs no proper Λ."""
        scaled = (self.lam @ theta.unsqueeze(-1)).squeeze(-1) if self.full else self.lam * theta
        return scaled - self.eta

    def pull(self, gradient: Tensor, theta: Tensor) -> Tensor:
        """`gradient` plus the slope at θ, in as few passes over memory as it takes."""
        return gradient + self.slope(theta) if self.full else torch.addcmul(gradient, theta, self.lam).sub_(self.eta)

    def proper(self, floor: float = FLOOR) -> Gaussian:
        """The same factor with every precision at least `floor`; the entries raised are counted."""
        if not self.full:
            guards.count("precision floor", self.lam < floor)
            return Gaussian(self.eta, self.lam.clamp_min(floor))
        values, vectors, rounding = self._spectrum()
        least = rounding.clamp_min(floor)
        guards.count("precision floor", values < least)
        if bool((values >= least).all()):
            return self
        return Gaussian(self.eta, (vectors * values.maximum(least).unsqueeze(-2)) @ vectors.mT)

    def informative(self) -> Gaussian:
        """The same factor, silent wherever its precision is negative: there η and Λ become 0, and are counted. It may
        be improper; it is a force on something proper, and η without Λ would be a force without bound."""
        if not self.full:
            lost = self.lam < 0
            guards.count("cavity without precision", lost)
            return Gaussian(self.eta.masked_fill(lost, 0), self.lam.masked_fill(lost, 0))
        values, vectors, rounding = self._spectrum()
        kept = values >= -rounding
        guards.count("cavity without precision", ~kept)
        if bool(kept.all()):
            return self
        held = vectors * kept.unsqueeze(-2)
        eta = (held @ (held.mT @ self.eta.unsqueeze(-1))).squeeze(-1)
        return Gaussian(eta, (held * values.unsqueeze(-2)) @ held.mT)

    def _spectrum(self) -> tuple[Tensor, Tensor, Tensor]:
        """Eigenvalues of a full Λ, its eigenvectors, and what rounding cannot tell from 0, [..., 1]."""
        # eigh raises on NaN, which would end a round for one client: such a client gets NaN, and is rejected.
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
    def var(self) -> Tensor:
        """The variance of every coordinate, [..., P]: the diagonal of Λ⁻¹."""
        q = self.proper()
        if q.full:
            return torch.cholesky_inverse(q._root()).diagonal(dim1=-2, dim2=-1)
        return (1 / q.lam).expand_as(q.eta)

    def _root(self) -> Tensor:
        root: Tensor = torch.linalg.cholesky_ex(self.lam).L  # of a proper Λ, or of NaN: nothing to check
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

    def log_density(self, theta: Tensor) -> Tensor:
        """ln N(θ), normalised, [...]."""
        q = self.proper()
        mahalanobis = ((theta - q._mean()) * q.slope(theta)).sum(-1)
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
        distance = (off * Gaussian(torch.zeros_like(p.eta), p.lam).slope(off)).sum(-1)
        return 0.5 * (trace - self.eta.shape[-1] + distance + q._logdet() - p._logdet())

    def sample(self, count: int, seed: int = 0) -> Tensor:
        """[count, ..., P] draws; draw i depends on (seed, i) alone."""
        q = self.proper()
        key = keys.key(seed, purpose="sample", client=torch.arange(count))
        noise = keys.normal(key, *self.eta.shape, dtype=self.eta.dtype, device=self.eta.device)
        if not q.full:
            return q._mean() + noise * q.lam.rsqrt()
        # Λ = LLᵀ, so L⁻ᵀ z has covariance Λ⁻¹.
        spread: Tensor = torch.linalg.solve_triangular(q._root().mT, noise.unsqueeze(-1), upper=True)
        return q._mean() + spread.squeeze(-1)
