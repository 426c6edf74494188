"""FedEP's toy problem: the product of two clients' Gaussians."""

import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from consilience.algorithms import ADF, Algorithm, FedEP, FedPADiagonal, FedSEP
from consilience.core.gaussian import Gaussian
from consilience.data import Cohort, Dataset, Federation
from consilience.figures.panels import Curve, Ellipse, Mark, Panel, Panels
from consilience.inference import Newton, Tilted
from consilience.inference.tilted import scaled_identity
from consilience.recipes.base import Options, Recipe, finished, rows_of
from consilience.recipes.fedep_linear import beliefs, by_sweep, linear
from consilience.studies.comparison import Comparison
from consilience.tasks.task import Task

DRAWS = 200
TOGETHER = 50  # draws in one federation: more of them cost more in curvature between draws, which is 0
PRECISION = 4.0  # the scaled identity's, the best of 2, 4, 8, 16 and 32
TEXT = (
    "Two clients each hold a Gaussian over two weights; the target is their product. The error is the distance of a "
    "method's mean from the product's, over random pairs. Inference is exact within each method's family: FedAvg has "
    "means only; FedPA, FedEP, FedSEP and ADF have a variance for each coordinate, no correlations; FedEP(I) has one "
    "fixed precision. FedPA multiplies the clients' own posteriors. In FedEP each client corrects its factor given the "
    "other's, and the errors of the family cancel in the mean."
)
PAPER = {"FedAvg": 0.54, "FedPA": 0.26, "FedEP": 1.1e-7}


@dataclass(frozen=True)
class Mode(Tilted):
    """The scaled identity with the exact mean of a quadratic tilted energy in place of SGD; precision c·n_k + Λ₋ₖ."""

    letter: ClassVar[str] = "I"
    scale: float

    def site(self, mean: Tensor, n: Tensor) -> Gaussian:
        return scaled_identity(mean, n, self.scale)

    def __call__(self, task: Task, cavity: Gaussian, start: Tensor, cohort: Cohort) -> Gaussian:
        mean = Newton(steps=1)(task, cavity, start, cohort).mean
        return Gaussian.of(mean, cavity.lam + self.scale * cohort.n)


def draw(seed: int, count: int = DRAWS) -> tuple[Tensor, Tensor]:
    """Means [count, 2, 2] and covariances [count, 2, 2, 2] of two clients' Gaussians."""
    from scipy.stats import invwishart
    from sklearn.datasets import make_spd_matrix

    rng, scale = np.random.default_rng(seed), make_spd_matrix(2, random_state=0)
    mean, covariance = np.empty((count, 2, 2)), np.empty((count, 2, 2, 2))
    for index in np.ndindex(count, 2):
        covariance[index] = invwishart.rvs(7, scale, random_state=rng)
        mean[index] = rng.multivariate_normal(np.zeros(2), covariance[index] / 0.2)
    return torch.from_numpy(mean), torch.from_numpy(covariance)


def product(mean: Tensor, covariance: Tensor) -> Gaussian:
    """The product of the two Gaussians of each draw."""
    precision = covariance.inverse()
    return Gaussian((precision @ mean.unsqueeze(-1)).squeeze(-1).sum(1), precision.sum(1))


def federation(mean: Tensor, covariance: Tensor) -> Federation:
    """N(μ, Λ⁻¹) with Λ = LLᵀ is the likelihood of two examples: inputs Lᵀ, targets Lᵀμ, noise 1. Draws have separate
    weights and examples, so each draw is a federation of its own."""
    root = torch.linalg.cholesky(covariance.inverse()).mT
    y = (root @ mean.unsqueeze(-1)).transpose(0, 1).reshape(-1, 1)
    x = torch.zeros(2, *2 * (len(root), 2), dtype=root.dtype)
    for index in range(len(root)):
        x[:, index, :, index] = root[index]
    return Federation.from_owner(Dataset(x.view(len(y), -1), y), torch.arange(2).repeat_interleave(len(y) // 2))


def methods() -> dict[str, Algorithm]:
    """All methods with exact inference in their families."""
    diagonal, identity = Newton(steps=1, diagonal=True), Mode(PRECISION / (2 * TOGETHER))
    return {
        # With exact local minima and equal precisions q's mean is FedAvg's average.
        "FedAvg": FedPADiagonal(identity),
        "FedPA": FedPADiagonal(diagonal),
        "FedEP": FedEP(diagonal),
        "FedEP(I)": FedEP(identity),
        "FedSEP": FedSEP(diagonal),
        "ADF": ADF(diagonal),
    }


def path(algorithm: Algorithm, mean: Tensor, covariance: Tensor, sweeps: int) -> Tensor:
    """The mean after each sweep in each draw, [sweeps, draws, 2]."""
    # Without a cavity, clients send the same factor in each sweep.
    count = 1 if isinstance(algorithm, FedPADiagonal) else sweeps
    parts = []
    for first in range(0, len(mean), TOGETHER):
        some = slice(first, first + TOGETHER)
        found = beliefs(algorithm, linear(2 * TOGETHER), federation(mean[some], covariance[some]), count)
        parts.append(torch.stack([belief.mean.view(-1, 2) for belief in found]))
    return torch.cat(parts, 1).expand(sweeps, -1, -1)


def run(options: Options) -> Comparison:
    """All methods on the draws of all seeds together."""
    start = time.perf_counter()
    draws, sweeps = (TOGETHER, 30) if options.quick else (DRAWS, 100)
    world = [draw(seed, draws) for seed in range(options.seeds)]
    paths: dict[str, Tensor] = {}
    for method, algorithm in methods().items():
        found = []
        for seed, (mean, covariance) in enumerate(world):
            options.tell(method, seed)
            found.append(path(algorithm, mean, covariance, sweeps))
        paths[method] = torch.cat(found, 1)
    mean, covariance = (torch.cat(part) for part in zip(*world, strict=True))
    target = product(mean, covariance)
    errors = {method: (found - target.mean).norm(dim=-1) for method, found in paths.items()}
    rows = rows_of(
        {(method, "error"): error[-1].tolist() for method, error in errors.items()},
        {(method, "error"): value for method, value in PAPER.items()},
    )
    figures = [figure(mean, covariance, paths, errors)]
    return finished("fedep-toy", "The product of two Gaussians", TEXT, options, rows, figures, start, over="draws")


def figure(mean: Tensor, covariance: Tensor, paths: dict[str, Tensor], errors: dict[str, Tensor]) -> Panels:
    """A typical draw, and errors by sweep."""
    error = torch.stack([errors[method][-1] for method in ("FedAvg", "FedPA")])
    typical = int((error / error.mean(1, keepdim=True) - 1).abs().sum(0).argmin())
    target = product(mean[typical : typical + 1], covariance[typical : typical + 1])
    centre, width = target.mean[0].tolist(), target.lam.inverse()[0].tolist()
    clients = [Ellipse(f"client {k + 1}", mean[typical, k].tolist(), covariance[typical, k].tolist()) for k in range(2)]
    means = {method: found[:, typical].T.tolist() for method, found in paths.items()}
    plane = Panel(
        "One draw",
        [Curve(method, *means[method]) for method in ("FedEP(I)", "FedEP")],
        [
            *(Mark(method, x[-1], y[-1]) for method, (x, y) in means.items() if method in ("FedAvg", "FedPA", "FedEP")),
            Mark("product", *centre),
        ],
        [*clients, Ellipse("product", centre, width, strong=True)],
    )
    curves = [by_sweep(method, error.mean(1)) for method, error in errors.items()]
    return Panels(
        "From two Gaussians to one",
        "Left: the two clients' Gaussians and their product, as contours of one and two standard deviations; the "
        "methods' means, and the path of FedEP's mean over the sweeps. It is the draw where the errors of FedAvg and "
        "FedPA are nearest to their averages. Right: the mean error over all draws after each sweep. FedSEP has no "
        "client state and stops at another point; ADF counts the data again in each sweep.",
        [plane, Panel("Error of the mean", curves, x_label="sweep", log=True)],
    )


RECIPE = Recipe("fedep-toy", "Two clients' Gaussians multiplied: FedEP's toy, 200 draws a seed", run, seeds=1)
