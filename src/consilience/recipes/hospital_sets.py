"""Prediction sets of four hospitals: coverage and size over many splits."""

from __future__ import annotations

import time

from scipy.stats import betabinom

from consilience.algorithms import Algorithm, FedEP, PartialPooling
from consilience.data import Federation
from consilience.evaluation.calibration import Calibration
from consilience.inference import Newton
from consilience.recipes.base import Options, Recipe, finished, rows_of
from consilience.recipes.personal_setting import Table, hospitals, learn
from consilience.runs import Run
from consilience.studies.comparison import Comparison

TEXT = (
    "Half of every hospital's patients train a logistic regression, a quarter calibrates prediction sets, and a "
    "quarter tests them; each seed is another split. Sets should contain the truth for 90 % of the patients. “own” "
    "thresholds come from a hospital's own patients if it has at least 50 of them for calibration, “all” is one "
    "threshold for all hospitals, and “naive” sets hold 90 % of the predicted probability without any calibration. "
    "“outside” is the share of splits whose overall coverage lies outside the central 99.9 % of its distribution "
    "under exact validity (Beta-binomial), “outside, hospitals” that of hospitals with thresholds of their own."
)
LEVEL = 0.9
DRAWS = 100  # of a posterior


def methods(quick: bool) -> dict[str, tuple[Algorithm, int]]:
    """Methods and their rounds: one model for all, and one for each hospital."""
    pooling = PartialPooling(Newton(), damping=1.0, prior=1.0, tau=0.1**0.5, parts="all")
    return {
        "FedEP": (FedEP(Newton(), damping=1.0, prior=1.0), 8),
        "PartialPooling": (pooling, 15 if quick else 40),
    }


def run(options: Options) -> Comparison:
    """Sets of both methods on each split."""
    table, start = Table(), time.perf_counter()
    for seed in range(options.seeds):
        rest, test = hospitals().split(0.25, seed=seed)
        train, held = rest.split(1 / 3, seed=seed)
        for name, method in methods(options.quick).items():
            options.tell(name, seed)
            fitted = learn(method, train)
            score(table, name, fitted, fitted.calibrate(held, samples=DRAWS), held, test)
    title = "Prediction sets of four hospitals"
    return finished(
        "hospital-sets", title, TEXT, options, rows_of(table.scores), [], start, per_client=table.per_client()
    )


def score(table: Table, name: str, fitted: Run, calibration: Calibration, held: Federation, test: Federation) -> None:
    """Append the coverage and size of a split's sets, with thresholds of all hospitals and of each."""
    for label, used in (("all", calibration.shared), ("own", calibration)):
        fitted.calibration = used
        found = fitted.evaluate(test, samples=DRAWS, coverage=LEVEL)
        assert found.marginal is not None
        kinds = {f"{name}, {label}": ("coverage", "set_size")}
        if label == "all":
            kinds[f"{name}, naive"] = ("naive_coverage", "naive_set_size")
        for method, metrics in kinds.items():
            shown = [metric.removeprefix("naive_") for metric in metrics]
            table.add(method, dict(zip(shown, (found.marginal[metric] for metric in metrics), strict=True)))
            for client in found.clients:
                values = (client["metrics"][metric] for metric in metrics)
                table.add(method, dict(zip(shown, values, strict=True)), hospital=client["name"])
        if label == "all":
            outside = _outside(found.marginal["coverage"], test.examples, held.examples, len(held))
            table.add(f"{name}, all", {"outside": outside})
        else:
            enough = [client for client in found.clients if client["name"] in calibration.names]
            sizes = dict(zip(calibration.names, calibration.own.sum(1).tolist(), strict=True))
            each = [
                _outside(client["metrics"]["coverage"], client["examples"], sizes[client["name"]], 1)
                for client in enough
            ]
            table.add(f"{name}, own", {"outside, hospitals": sum(each) / len(each)})


def _outside(coverage: float, tested: int, calibrated: int, clients: int) -> float:
    """1 if a coverage lies outside the central 99.9 % of its Beta-binomial distribution; a rank is ⌈0.9 (n + K)⌉."""
    rank = -(-9 * (calibrated + clients) // 10)
    low, high = betabinom(tested, rank, calibrated + clients - rank).ppf([0.0005, 0.9995])
    return float(not low <= round(coverage * tested) <= high)


RECIPE = Recipe("hospital-sets", "Prediction sets with guaranteed coverage at four hospitals", run, seeds=100,
                quick_seeds=4)  # fmt: skip
