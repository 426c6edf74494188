"""Judging: measures of clients' Gaussian factors, and bounds beyond which a server refuses them.

If the server clipped an update that its client follows in full, q = p₀ Π q_k would be lost. So the server refuses the
update, and the client keeps its factor. Bounds are relative to the median of the round, which one client of three
cannot choose.
"""

import torch
from torch import Tensor

from consilience.core import Gaussian

NEGLIGIBLE = 1e-3
"""The share of q's precision that counts as no precision: rounding may leave so much, or take it."""


def measured(q: Gaussian, delta: Gaussian, cavity: Gaussian, n: Tensor, *, surprise: bool = False) -> dict[str, Tensor]:
    """Measures [K] of the clients' tilted distributions, q · Δ, and of their sites, tilted / cavity:

    - least: the smallest precision λ_t of the tilted distribution along any axis, relative to q's;
    - move: the largest |μ_t − μ| along any axis, from q's mean to the tilted mean, in standard deviations of q;
    - precision: the largest |λ_s| of the site along any axis, divided by the client's examples n;
    - surprise, if asked for: the mean over axes of (μ_s − μ_c)² / (1/λ_s + 1/λ_c), from the cavity's mean to the
      site's. It is 1 on average if both are beliefs about the same weights.

    Axes are coordinates. For full precisions they are the axes of Δ where q has the precision 1."""
    q = q.proper()
    site = (q * delta) / cavity
    largest = site.lam.abs().amax(-1)
    if q.full:
        largest, axes = site.spectrum()[0].abs().amax(-1), _axes(q, delta)
        q, delta, site, cavity = (_along(axes, factor) for factor in (q, delta, site, cavity))
    relative = 1 + delta.lam / q.lam
    force = delta.eta - delta.lam * q.mean  # λ_t (μ_t − μ)
    found = {
        "least": relative.amin(-1),
        "move": (force.abs() / (relative.clamp_min(NEGLIGIBLE) * q.lam.sqrt())).amax(-1),
        "precision": largest / n.squeeze(-1),
    }
    return found | ({"surprise": _surprise(site, cavity)} if surprise else {})


def _axes(q: Gaussian, delta: Gaussian) -> Tensor:
    """B [K, P, P] with BᵀΛB = 1 for q's precision and diagonal BᵀΛB for those of Δ."""
    root = torch.linalg.cholesky_ex(q.lam).L
    half = torch.linalg.solve_triangular(root, delta.lam, upper=False)
    white = torch.linalg.solve_triangular(root, half.mT, upper=False)
    _, vectors, _ = Gaussian(delta.eta, white).spectrum()
    axes: Tensor = torch.linalg.solve_triangular(root.mT, vectors, upper=True)
    return axes


def _along(axes: Tensor, factor: Gaussian) -> Gaussian:
    """A factor with a full precision in coordinates along `axes`, without its correlations there."""
    eta = (axes.mT @ factor.eta.unsqueeze(-1)).squeeze(-1)
    return Gaussian(eta, (axes * (factor.lam @ axes)).sum(-2))


def _surprise(site: Gaussian, cavity: Gaussian) -> Tensor:
    both = (site.lam > 0) & (cavity.lam > 0)
    of_site, of_cavity = (torch.where(both, factor.lam, 1) for factor in (site, cavity))
    off = site.eta / of_site - cavity.eta / of_cavity
    return torch.where(both, off.square() / (1 / of_site + 1 / of_cavity), 0).mean(-1)


def judged(
    measures: dict[str, Tensor], precision: float | None, move: float | None, surprise: float | None
) -> dict[int, str]:
    """The rows of a round that exceed a bound, and why. The median is the lower one of an even number. A bound that is
    None is not applied."""
    typical = {name: float(values.double().nanmedian()) for name, values in measures.items()}
    found: dict[int, str] = {}
    for row in range(len(measures["least"])):
        got = {name: float(values[row]) for name, values in measures.items()}
        if not got["least"] >= -NEGLIGIBLE:
            found[row] = f"the tilted distribution has no positive precision: {got['least']:.3g} of the posterior's"
        elif precision is not None and not got["precision"] <= (most := precision * typical["precision"]):
            found[row] = (
                f"its factor has a precision of {got['precision']:.3g} an example, more than {most:.3g}, which is "
                f"{precision:g} times the median"
            )
        elif move is not None and not got["move"] <= (most := move * max(1.0, typical["move"])):
            found[row] = f"it moves the mean by {got['move']:.3g} standard deviations, more than {most:.3g}"
        elif surprise is not None and not got["surprise"] <= (most := surprise * max(1.0, typical["surprise"])):
            found[row] = f"the surprise of its factor under the cavity is {got['surprise']:.3g}, more than {most:.3g}"
    return found
