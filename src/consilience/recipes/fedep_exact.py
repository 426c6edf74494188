"""FedEP where the right answer is known: pairs of Gaussians, and linear regression."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from consilience.algorithms import ADF, FedAvg, FedEP, FedPA, FedPADiagonal, FedSEP
from consilience.algorithms.base import Algorithm
from consilience.core.beliefs import Belief
from consilience.core.gaussian import Gaussian
from consilience.data import Dataset, Federation
from consilience.data.cohort import Cohort
from consilience.engines import Simulator
from consilience.figures.panels import Curve, Ellipse, Mark, Panel, Panels
from consilience.inference import Newton, Tilted
from consilience.inference.tilted import scaled_identity
from consilience.metrics import spread
from consilience.optim import SGD
from consilience.recipes.base import Options, Recipe
from consilience.runs.fit import fit
from consilience.studies.comparison import Comparison, Row
from consilience.tasks.supervised import Regression
from consilience.tasks.task import Task

ENGINE = Simulator(device="cpu", chunk=5, workers=1, threads=1, precision="float64")


@dataclass(frozen=True)
class Mode(Tilted):
    """The scaled identity without SGD: the exact mean of a quadratic tilted energy, and precision c·n_k + Λ₋ₖ."""

    letter: ClassVar[str] = "I"
    scale: float

    def site(self, mean: Tensor, n: Tensor) -> Gaussian:
        """Precision c·n, a scalar."""
        return scaled_identity(mean, n, self.scale)

    def __call__(self, task: Task, cavity: Gaussian, start: Tensor, cohort: Cohort) -> Gaussian:
        """One Newton step for the mean."""
        mean = Newton(steps=1)(task, cavity, start, cohort).mean
        return Gaussian.of(mean, cavity.lam + self.scale * cohort.n)


def beliefs(algorithm: Algorithm, task: Task, federation: Federation, sweeps: int) -> list[Belief]:
    """What the server believes after every sweep over all clients."""
    found: list[Belief] = []
    fit(
        algorithm,
        task,
        federation,
        rounds=sweeps,
        engine=ENGINE,
        progress=False,
        callbacks=[lambda run, _: found.append(run.posterior)],
    )
    return found


def linear(features: int, noise: float = 1.0) -> Regression:
    """y = θᵀx + noise, from θ = 0."""
    module = nn.Linear(features, 1, bias=False)
    nn.init.zeros_(module.weight)
    return Regression(module, noise=noise)


def rows_of(scores: Mapping[str, Tensor], metric: str, paper: Mapping[str, float] | None = None) -> list[Row]:
    """A row a method, from its scores in every draw."""
    values = {method: score.tolist() for method, score in scores.items()}
    return [
        Row(method, metric, *spread(found), len(found), (paper or {}).get(method)) for method, found in values.items()
    ]


def by_sweep(method: str, error: Tensor) -> Curve:
    """One number after every sweep."""
    return Curve(method, list(range(1, len(error) + 1)), error.tolist())


DRAWS = 200
TOGETHER = 50  # draws in one federation: more of them cost more in curvature between draws, which is 0
PRECISION = 4.0  # the scaled identity's, the best of 2, 4, 8, 16 and 32
TOY_TEXT = (
    "Two clients each hold a Gaussian over two weights; what they say together is the product. The error is the "
    "distance of a method's mean from the product's, over random pairs. All infer exactly, as far as their "
    "Gaussians can say it: FedAvg knows means only; FedPA, FedEP, FedSEP and ADF know a variance for each coordinate, "
    "but no correlations; FedEP(I) has one fixed precision. FedPA multiplies what clients believe alone. In FedEP "
    "every client corrects its factor in view of the other's, and what the factors cannot say cancels out."
)
TOY_PAPER = {"FedAvg": 0.54, "FedPA": 0.26, "FedEP": 1.1e-7}


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
    """What the clients say together, in every draw."""
    precision = covariance.inverse()
    return Gaussian((precision @ mean.unsqueeze(-1)).squeeze(-1).sum(1), precision.sum(1))


def federation(mean: Tensor, covariance: Tensor) -> Federation:
    """N(μ, Λ⁻¹) with Λ = LLᵀ is the likelihood of two examples: inputs Lᵀ, targets Lᵀμ, noise 1. Draws lie side by
    side: no example looks at the weights of two draws, so each is a federation of its own."""
    root = torch.linalg.cholesky(covariance.inverse()).mT
    y = (root @ mean.unsqueeze(-1)).transpose(0, 1).reshape(-1, 1)
    x = torch.zeros(2, *2 * (len(root), 2), dtype=root.dtype)
    for index in range(len(root)):
        x[:, index, :, index] = root[index]
    return Federation.from_owner(Dataset(x.view(len(y), -1), y), torch.arange(2).repeat_interleave(len(y) // 2))


def toy_methods() -> dict[str, Algorithm]:
    """With exact inference in each method's family."""
    diagonal, identity = Newton(steps=1, diagonal=True), Mode(PRECISION / (2 * TOGETHER))
    return {
        # Clients who find their minimum exactly, and equal precisions: q's mean is FedAvg's average.
        "FedAvg": FedPADiagonal(identity),
        "FedPA": FedPADiagonal(diagonal),
        "FedEP": FedEP(diagonal),
        "FedEP(I)": FedEP(identity),
        "FedSEP": FedSEP(diagonal),
        "ADF": ADF(diagonal),
    }


def path(algorithm: Algorithm, mean: Tensor, covariance: Tensor, sweeps: int) -> Tensor:
    """The mean after every sweep in every draw, [sweeps, draws, 2]."""
    # Clients who infer alone say the same again in every sweep.
    count = 1 if isinstance(algorithm, FedPADiagonal) else sweeps
    parts = []
    for first in range(0, len(mean), TOGETHER):
        some = slice(first, first + TOGETHER)
        found = beliefs(algorithm, linear(2 * TOGETHER), federation(mean[some], covariance[some]), count)
        parts.append(torch.stack([belief.mean.view(-1, 2) for belief in found]))
    return torch.cat(parts, 1).expand(sweeps, -1, -1)


def toy(options: Options) -> Comparison:
    """All methods on the draws of every seed together."""
    start = time.perf_counter()
    draws, sweeps = (TOGETHER, 30) if options.quick else (DRAWS, 100)
    world = [draw(seed, draws) for seed in range(options.seeds)]
    paths: dict[str, Tensor] = {}
    for method, algorithm in toy_methods().items():
        found = []
        for seed, (mean, covariance) in enumerate(world):
            if options.announce is not None:
                options.announce(method, seed)
            found.append(path(algorithm, mean, covariance, sweeps))
        paths[method] = torch.cat(found, 1)
    mean, covariance = (torch.cat(part) for part in zip(*world, strict=True))
    target = product(mean, covariance)
    errors = {method: (found - target.mean).norm(dim=-1) for method, found in paths.items()}
    result = Comparison(
        "The product of two Gaussians",
        TOY_TEXT,
        options.command("fedep-toy"),
        rows=rows_of({method: error[-1] for method, error in errors.items()}, "error", TOY_PAPER),
        figures=[toy_figure(mean, covariance, paths, errors)],
        over="draws",
    )
    result.seconds = time.perf_counter() - start
    result.save(options.out)
    return result


def toy_figure(mean: Tensor, covariance: Tensor, paths: dict[str, Tensor], errors: dict[str, Tensor]) -> Panels:
    """A usual draw, and errors by sweep."""
    error = torch.stack([errors[method][-1] for method in ("FedAvg", "FedPA")])
    usual = int((error / error.mean(1, keepdim=True) - 1).abs().sum(0).argmin())
    target = product(mean[usual : usual + 1], covariance[usual : usual + 1])
    centre, width = target.mean[0].tolist(), target.lam.inverse()[0].tolist()
    clients = [Ellipse(f"client {k + 1}", mean[usual, k].tolist(), covariance[usual, k].tolist()) for k in range(2)]
    means = {method: found[:, usual].T.tolist() for method, found in paths.items()}
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
        "methods' means, and the way of FedEP's mean over the sweeps. It is the draw in which the errors of FedAvg and "
        "FedPA are nearest to their averages. Right: the mean error over all draws after every sweep. FedSEP has no "
        "memory at the clients, and stops at another point; ADF counts the data again in every sweep.",
        [plane, Panel("Error of the mean", curves, x_label="sweep", log=True)],
    )


SIZES = (40, 25, 12, 5, 3)
FEATURES = 6
PRIOR = 1.0
LINEAR_TEXT = (
    f"Bayesian linear regression with {FEATURES} weights at {len(SIZES)} clients of {', '.join(map(str, SIZES))} "
    "examples, each with its own distribution of inputs. The posterior of all data in one place is known; errors are "
    "the largest of any weight's mean and of any entry of the covariance. FedEP with full covariances finds it in one "
    "sweep without damping (δ = 1, shown after that sweep); with δ = 1/K errors fall by 1 − 1/K a sweep, in FedSEP "
    "too. FedPA(N) multiplies exact local posteriors without correlations, and clients with fewer examples than "
    "weights are lost to it. FedAvg and FedPA run SGD, five epochs in batches of 10 with the best step size of 0.02, "
    "0.05 and 0.1."
)
ONE, MANY = "FedEP, δ = 1", "FedEP, δ = 1/K"


def regression(seed: int) -> Federation:
    """Clients whose inputs have centres and correlations of their own."""
    rng = np.random.default_rng(seed)
    truth, silos = rng.normal(size=FEATURES), {}
    for client, size in enumerate(SIZES):
        mix = rng.normal(size=(FEATURES, FEATURES)) / FEATURES**0.5
        x = rng.normal(size=FEATURES) + rng.normal(size=(size, FEATURES)) @ mix
        y = x @ truth + rng.normal(size=size)
        silos[f"client {client + 1}"] = Dataset(torch.from_numpy(x), torch.from_numpy(y).unsqueeze(1))
    return Federation.from_silos(silos)


def pooled(federation: Federation) -> Gaussian:
    """The posterior of all data in one place."""
    x, y = federation.data.x, federation.data.y
    return Gaussian((x.mT @ y).squeeze(1), x.mT @ x + PRIOR * torch.eye(FEATURES, dtype=x.dtype))


def linear_methods() -> dict[str, Algorithm]:
    """Exact ones, and two that run SGD on the same objective."""
    exact = Newton(steps=1)
    train = SGD(lr=0.02, epochs=5, batch_size=10, weight_decay=PRIOR / sum(SIZES))
    return {
        ONE: FedEP(exact, damping=1.0, prior=PRIOR),
        MANY: FedEP(exact, prior=PRIOR),
        "FedSEP, δ = 1/K": FedSEP(exact, prior=PRIOR),
        "ADF": ADF(exact, prior=PRIOR),
        "FedPA(N)": FedPADiagonal(Newton(steps=1, diagonal=True)),
        "FedPA": FedPA(train, rho=0.1, burn_in=1),
        "FedAvg": FedAvg(train),
    }


def covariance_of(belief: Belief) -> Tensor | None:
    """As a matrix, if the belief has one."""
    if not isinstance(belief, Gaussian):
        return None
    return belief.lam.inverse() if belief.full else belief.variance.diag()


def distances(found: list[Belief], exact: Gaussian) -> tuple[Tensor, Tensor | None]:
    """The largest errors of mean and covariance after every sweep."""
    off = torch.stack([belief.mean - exact.mean for belief in found]).abs().amax(1)
    covariances = [covariance for belief in found if (covariance := covariance_of(belief)) is not None]
    if not covariances:
        return off, None
    return off, (torch.stack(covariances) - exact.lam.inverse()).abs().amax((1, 2))


def regress(options: Options) -> Comparison:
    """All methods on one regression a seed."""
    start, sweeps = time.perf_counter(), 20 if options.quick else 100
    means: dict[str, Tensor] = {}
    covariances: dict[str, Tensor] = {}
    for method, algorithm in linear_methods().items():
        found = []
        for seed in range(options.seeds):
            if options.announce is not None:
                options.announce(method, seed)
            clients = regression(seed)
            found.append(distances(beliefs(algorithm, linear(FEATURES), clients, sweeps), pooled(clients)))
        means[method] = torch.stack([mean for mean, _ in found])
        if all(covariance is not None for _, covariance in found):
            covariances[method] = torch.stack([covariance for _, covariance in found if covariance is not None])
    result = Comparison(
        "Linear regression, exactly",
        LINEAR_TEXT,
        options.command("fedep-linear"),
        rows=linear_rows(means, covariances),
        figures=[linear_figure(means, covariances)],
    )
    result.seconds = time.perf_counter() - start
    result.save(options.out)
    return result


def linear_rows(means: dict[str, Tensor], covariances: dict[str, Tensor]) -> list[Row]:
    """Errors at the end, or after the first sweep of FedEP without damping; and how fast damped errors fall."""
    rows = []
    for metric, errors in {"mean_error": means, "cov_error": covariances}.items():
        rows += rows_of({method: error[:, 0 if method == ONE else -1] for method, error in errors.items()}, metric)
    damped = {method: error for method, error in means.items() if method.endswith("δ = 1/K")}
    # From a quarter to three quarters of the way: far from the start, where the mean is no linear function of the
    # natural parameters' error, and from the end, where rounding may be all that is left.
    early, late = (share * len(means[MANY][0]) // 4 - 1 for share in (1, 3))
    rows += rows_of(
        {m: (error[:, late] / error[:, early]) ** (1 / (late - early)) for m, error in damped.items()}, "factor"
    )
    rows += rows_of({m: torch.full_like(error[:, 0], 1 - 1 / len(SIZES)) for m, error in damped.items()}, "1 − 1/K")
    return rows


def linear_figure(means: dict[str, Tensor], covariances: dict[str, Tensor]) -> Panels:
    """Errors by sweep."""
    panels = []
    for title, errors in {"Error of the mean": means, "Error of the covariance": covariances}.items():
        curves = [by_sweep(method, error.mean(0)) for method, error in errors.items()]
        panels.append(Panel(title, curves, x_label="sweep", log=True))
    return Panels(
        "Errors by sweep",
        "The largest difference from the posterior of the pooled data. FedEP and FedSEP with δ = 1/K lie on top of "
        "each other; FedEP with δ = 1 has only rounding left after the first sweep. ADF has counted all data once "
        "after K sweeps, and goes on to count them again.",
        panels,
    )


RECIPES = (
    Recipe("fedep-toy", "Two clients' Gaussians multiplied: FedEP's toy, 200 draws a seed", toy, seeds=1),
    Recipe("fedep-linear", "Linear regression, where FedEP finds the posterior of the pooled data", regress, seeds=1),
)
