"""The curvature of a loss in the weights of a last linear layer, and the posterior that follows from it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadCurvature:
    """H = `inner` ⊗ `outer` at the head's weights (W, b) = `weight` [C, D]. If H is full, `inner` is [1, 1]."""

    weight: Tensor
    outer: Tensor
    inner: Tensor

    @property
    def directions(self) -> int:
        """The number of directions whose variances the head adds up: D, or all C · D weights' where H is full."""
        return len(self.outer)

    def precision(self, prior: float | None = None) -> Tensor:
        """H + τ 1, [C·D, C·D]."""
        h = torch.kron(self.inner, self.outer)
        values = self._spectrum()[0]
        return h + torch.eye(len(h)).to(h) * self._tau(values, prior)

    def head(self, prior: float | None) -> tuple[Tensor, ...]:
        """The parameters of a `LaplaceHead`.

        With H + τ = (V ⊗ U) diag(v_j u_i + τ) (V ⊗ U)ᵀ, the variance of logit c is Σ_ij V_cj² (φᵀu_i)² / (v_j u_i + τ).
        If H is full, it is ‖R_c φ‖² with R_cᵀR_c the block of class c in (H + τ)⁻¹."""
        values, outer, inner = self._spectrum()
        (c, d), spread = self.weight.shape, 1 / (values + self._tau(values, prior))
        if len(self.outer) == d:  # also of one class, whose H is full as well
            project, variance = outer.mT, spread.mT @ inner.square().mT
        else:
            blocks = (outer * spread).mT.reshape(-1, c, d), outer.mT.reshape(-1, c, d)
            covariance = torch.einsum("mci,mcj->cij", *blocks)
            project = torch.linalg.cholesky(covariance).mT.reshape(c * d, d)
            variance = torch.eye(c).to(project).repeat_interleave(d, 0)
        return self.weight[:, :-1], self.weight[:, -1], project, variance

    def _spectrum(self) -> tuple[Tensor, Tensor, Tensor]:
        """The eigenvalues of H as inner · outer, and the eigenvectors of `outer` and of `inner`."""
        (u, outer), (v, inner) = torch.linalg.eigh(self.outer), torch.linalg.eigh(self.inner)
        return v.clamp_min(0).unsqueeze(1) * u.clamp_min(0), outer, inner

    def _tau(self, values: Tensor, prior: float | None) -> float:
        """The prior's precision: the given one, or that with the largest log marginal likelihood of the data, which is
        ½ (P ln τ − Σ ln(h + τ) − τ ‖W‖²) but for a constant, on a grid that is refined twice."""
        if prior is not None:
            return prior
        grid = torch.linspace(-8, 8, 65, dtype=torch.float64).to(values)
        for _ in range(3):
            tau = 10**grid
            shrunk = torch.stack([(1 + values.flatten() / t).log().sum() for t in tau])
            best = int((-shrunk - tau * self.weight.square().sum()).argmax())
            ends = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
            grid = torch.linspace(float(ends[0]), float(ends[1]), 65, dtype=torch.float64).to(values)
        return float(tau[best])
