"""FedEP on linear regression, where the posterior of the pooled data is known."""

import time

import numpy as np
import torch
from torch import Tensor, nn

from consilience.algorithms import ADF, Algorithm, FedAvg, FedEP, FedPA, FedPADiagonal, FedSEP
from consilience.core import Belief, Gaussian
from consilience.data import Dataset, Federation
from consilience.engines import Simulator
from consilience.figures.panels import Curve, Panel, Panels
from consilience.inference import Newton
from consilience.optim import SGD
from consilience.recipes.base import Options, Recipe, finished, rows_of
from consilience.runs.fit import fit
from consilience.studies.comparison import Comparison, Row
from consilience.tasks import Regression, Task

ENGINE = Simulator(device="cpu", chunk=5, workers=1, threads=1, precision="float64")
SIZES = (40, 25, 12, 5, 3)
FEATURES = 6
PRIOR = 1.0
TEXT = (
    f"Bayesian linear regression with {FEATURES} weights at {len(SIZES)} clients of {', '.join(map(str, SIZES))} "
    "examples, each with its own distribution of inputs. The posterior of the pooled data is known; errors are the "
    "largest of any weight's mean and of any entry of the covariance. FedEP with full covariances finds it in one "
    "sweep without damping (δ = 1, shown after that sweep); with δ = 1/K errors fall by 1 − 1/K a sweep, in FedSEP "
    "too. FedPA(N) multiplies exact local posteriors without correlations, and loses clients with fewer examples than "
    "weights. FedAvg and FedPA run SGD, five epochs in batches of 10 with the best step size of 0.02, 0.05 and 0.1."
)
ONE, MANY = "FedEP, δ = 1", "FedEP, δ = 1/K"


def beliefs(algorithm: Algorithm, task: Task, federation: Federation, sweeps: int) -> list[Belief]:
    """The server's posterior after each sweep over all clients."""
    found: list[Belief] = []
    fit(
        algorithm, task, federation, rounds=sweeps, engine=ENGINE, progress=False,
        callbacks=[lambda run, _: found.append(run.posterior)],
    )  # fmt: skip
    return found


def linear(features: int, noise: float = 1.0) -> Regression:
    """y = θᵀx + noise, from θ = 0."""
    module = nn.Linear(features, 1, bias=False)
    nn.init.zeros_(module.weight)
    return Regression(module, noise=noise)


def by_sweep(method: str, error: Tensor) -> Curve:
    """A curve of one number after each sweep."""
    return Curve(method, list(range(1, len(error) + 1)), error.tolist())


def regression(seed: int) -> Federation:
    """Clients whose inputs have their own centres and correlations."""
    rng = np.random.default_rng(seed)
    truth, silos = rng.normal(size=FEATURES), {}
    for client, size in enumerate(SIZES):
        mix = rng.normal(size=(FEATURES, FEATURES)) / FEATURES**0.5
        x = rng.normal(size=FEATURES) + rng.normal(size=(size, FEATURES)) @ mix
        y = x @ truth + rng.normal(size=size)
        silos[f"client {client + 1}"] = Dataset(torch.from_numpy(x), torch.from_numpy(y).unsqueeze(1))
    return Federation.from_silos(silos)


def pooled(federation: Federation) -> Gaussian:
    """The posterior of the pooled data."""
    x, y = federation.data.x, federation.data.y
    return Gaussian((x.mT @ y).squeeze(1), x.mT @ x + PRIOR * torch.eye(FEATURES, dtype=x.dtype))


def methods() -> dict[str, Algorithm]:
    """Methods with exact inference, and two that run SGD on the same objective."""
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
    """The covariance matrix, if the belief has one."""
    if not isinstance(belief, Gaussian):
        return None
    return belief.lam.inverse() if belief.full else belief.variance.diag()


def distances(found: list[Belief], exact: Gaussian) -> tuple[Tensor, Tensor | None]:
    """The largest errors of mean and covariance after each sweep."""
    off = torch.stack([belief.mean - exact.mean for belief in found]).abs().amax(1)
    covariances = [covariance for belief in found if (covariance := covariance_of(belief)) is not None]
    if not covariances:
        return off, None
    return off, (torch.stack(covariances) - exact.lam.inverse()).abs().amax((1, 2))


def run(options: Options) -> Comparison:
    """All methods on one regression for each seed."""
    start, sweeps = time.perf_counter(), 20 if options.quick else 100
    means: dict[str, Tensor] = {}
    covariances: dict[str, Tensor] = {}
    for method, algorithm in methods().items():
        found = []
        for seed in range(options.seeds):
            options.tell(method, seed)
            clients = regression(seed)
            found.append(distances(beliefs(algorithm, linear(FEATURES), clients, sweeps), pooled(clients)))
        means[method] = torch.stack([mean for mean, _ in found])
        if all(covariance is not None for _, covariance in found):
            covariances[method] = torch.stack([covariance for _, covariance in found if covariance is not None])
    rows, figures = table(means, covariances), [figure(means, covariances)]
    return finished("fedep-linear", "Linear regression, exactly", TEXT, options, rows, figures, start)


def table(means: dict[str, Tensor], covariances: dict[str, Tensor]) -> list[Row]:
    """Errors at the end, or after the first sweep of FedEP without damping, and the factor by which damped errors
    fall in a sweep."""
    scores: dict[tuple[str, str], list[float]] = {}
    for metric, errors in {"mean_error": means, "cov_error": covariances}.items():
        for method, error in errors.items():
            scores[method, metric] = error[:, 0 if method == ONE else -1].tolist()
    damped = {method: error for method, error in means.items() if method.endswith("δ = 1/K")}
    # From a quarter to three quarters of the sweeps: near the start the mean is no linear function of the natural
    # parameters' error, and near the end rounding dominates.
    early, late = (share * len(means[MANY][0]) // 4 - 1 for share in (1, 3))
    for method, error in damped.items():
        scores[method, "factor"] = ((error[:, late] / error[:, early]) ** (1 / (late - early))).tolist()
    for method, error in damped.items():
        scores[method, "1 − 1/K"] = [1 - 1 / len(SIZES)] * len(error)
    return rows_of(scores)


def figure(means: dict[str, Tensor], covariances: dict[str, Tensor]) -> Panels:
    """Errors by sweep."""
    panels = []
    for title, errors in {"Error of the mean": means, "Error of the covariance": covariances}.items():
        curves = [by_sweep(method, error.mean(0)) for method, error in errors.items()]
        panels.append(Panel(title, curves, x_label="sweep", log=True))
    return Panels(
        "Errors by sweep",
        "The largest difference from the posterior of the pooled data. FedEP and FedSEP with δ = 1/K lie on top of "
        "each other; FedEP with δ = 1 reaches rounding after the first sweep. ADF has counted all data once after K "
        "sweeps, and then counts them again.",
        panels,
    )


RECIPE = Recipe("fedep-linear", "Linear regression, where FedEP finds the posterior of the pooled data", run, seeds=1)
