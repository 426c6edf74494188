"""Judging: measures of clients' Gaussian factors, and bounds beyond which a server refuses them.

If the server clipped an update that its client follows in full, q = p₀ Π q_k would be lost. So the server refuses the
update, and the client keeps its factor. Bounds are relative to medians of the round, in which a client counts by its
examples: clients with less than half of them cannot choose a median.
"""

import torch
from torch import Tensor

from consilience.core import Gaussian

NEGLIGIBLE = 1e-3
"""The share of q's precision, or of its standard deviation, that counts as nothing."""
LEFT = 0.1
"""The smallest share of q's precision that the clients of a round may leave together, along any axis."""


def measured(
    q: Gaussian,
    update: Gaussian,
    power: float,
    cavity: Gaussian,
    n: Tensor,
    *,
    round_size: int,
    others: Tensor | None = None,
) -> dict[str, Tensor]:
    """Measures [K] of the clients' tilted distributions, q · Δ, and of their sites, tilted / cavity, from their
    updates Δ^`power`:

    - least: the smallest precision λ_t of the tilted distribution along any axis, relative to q's;
    - fall, if the updates of `round_size` clients together can exceed q: the share of q's precision that Δ^`power`
      takes away along any axis;
    - move: the largest |μ_t − μ| along any axis, from q's mean to the tilted mean, in standard deviations of q;
    - precision: the largest |λ_s| of the site along any axis;
    - examples: n;
    - known, if the cavity is the belief of the `others` examples alone: its largest precision an example;
    - surprise: the root mean square of (μ_t − μ) √λ over all axes, the distance to the tilted mean under q.

    Axes are coordinates. For full precisions they are the axes of the site, of the cavity, and those of Δ where q has
    the precision 1."""
    q = q.proper()
    if q.full:
        site = (q / cavity) * update ** (1 / power)
    else:  # with fewer passes over memory
        site = Gaussian(update.eta, torch.add(q.lam - cavity.lam, update.lam, alpha=1 / power))
    found = {"examples": n.squeeze(-1), "precision": _largest(site)}
    if others is not None:
        found["known"] = _largest(cavity) / others.squeeze(-1).clamp_min(1)
    if q.full:
        axes = _axes(q, update)
        q, update = _along(axes, q), _along(axes, update)
    relative = (update.lam / (power * q.lam)).add_(1)  # λ_t / λ
    found["least"] = relative.amin(-1)
    force = torch.addcmul(update.eta, update.lam, q.mean, value=-1)  # power · λ_t (μ_t − μ)
    force /= relative.clamp_min_(NEGLIGIBLE).mul_(power * q.lam.sqrt())
    found["surprise"] = force.norm(dim=-1) / force.shape[-1] ** 0.5
    found["move"] = force.abs_().amax(-1)
    if power * round_size > 1 + NEGLIGIBLE:
        found["fall"] = power * (1 - found["least"]).clamp_min(0)
    return found


def _largest(factor: Gaussian) -> Tensor:
    return (factor.spectrum()[0] if factor.full else factor.lam).abs().amax(-1)


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


def ratios(measures: dict[str, Tensor]) -> dict[str, Tensor]:
    """Measures [K] of a round relative to typical ones, which are weighted medians:

    - precision: λ_k / (max(n_k, typical n) · max(typical λ/n, what the others are known to have)). A client with few
      examples may have as much precision as a typical one: the precision of single examples varies. It also varies in
      time: a classifier's falls while it learns, and the others' factors remember it.
    - move: relative to max(1, the typical one);
    - surprise: relative to max(`NEGLIGIBLE`, the typical one), as a belief that has converged moves by rounding;
    - spread, if it was measured: relative to max(1, the typical one)."""
    n, precision = measures["examples"].double(), measures["precision"].double()
    an_example = torch.full_like(n, _typical(precision / n, n))
    if "known" in measures:
        an_example = an_example.maximum(measures["known"].double())
    found = {"precision": precision / (n.clamp_min(_typical(n, n)) * an_example)}
    found["move"] = measures["move"] / max(1.0, _typical(measures["move"], n))
    found["surprise"] = measures["surprise"] / max(NEGLIGIBLE, _typical(measures["surprise"], n))
    if "spread" in measures:
        found["spread"] = measures["spread"] / max(1.0, _typical(measures["spread"], n))
    return found


def _typical(values: Tensor, weight: Tensor) -> float:
    """The weighted median, the lower one of two. Zeros do not count: a factor without information has no scale."""
    some = values > 0  # false for NaN
    if not bool(some.any()):
        return 1.0
    ordered, order = values[some].sort()
    below = weight[some][order].cumsum(0)
    return float(ordered[int((below < below[-1] / 2).sum())])


def judged(measures: dict[str, Tensor], **bounds: float | None) -> dict[int, str]:
    """The rows of a round whose tilted distribution has no positive precision, or whose ratio of a name in `bounds`
    exceeds the bound, and why. A bound that is None is not applied."""
    found = {
        row: f"the tilted distribution has no positive precision: {least:.3g} of the posterior's"
        for row, least in enumerate(measures["least"].tolist())
        if not least >= -NEGLIGIBLE
    }
    for name, values in ratios(measures).items():
        bound = bounds[name]
        for row, ratio in enumerate(values.tolist()):
            if bound is not None and not ratio <= bound and row not in found:
                found[row] = f"{WORDS[name]} is {ratio:.3g} times a typical client's, more than max_{name} = {bound:g}"
    return found


def exhausting(q: Gaussian, total: Gaussian, measures: dict[str, Tensor]) -> dict[int, str]:
    """The row that takes away most of q's precision, if the updates `total` of a round together leave too little."""
    if "fall" not in measures or not _exhausted(q, q * total):
        return {}
    reason = f"the round would leave less than {LEFT:g} of the posterior's precision, and it takes away most"
    return {int(measures["fall"].argmax()): reason}


def stays_proper(q: Gaussian, total: Gaussian) -> bool:
    """Whether the updates `total` of a round together leave q a precision along every axis where it has one."""
    return not _exhausted(q, q * total, left=-NEGLIGIBLE)


def _exhausted(q: Gaussian, after: Gaussian, left: float = LEFT) -> bool:
    """Whether less than a share `left` of q's precision remains. Along an axis where q has no precision, nothing can be
    taken away."""
    least = Gaussian(after.eta, after.lam - left * q.lam)
    if not least.full:
        return bool((least.lam < 0).any())
    values, _, rounding = least.spectrum()
    return bool((values < -rounding).any())


WORDS = {
    "precision": "the precision of its factor",
    "move": "its move of the posterior's mean",
    "surprise": "the distance of its tilted mean under the posterior",
    "spread": "its statistic of the clients' spread",
}
