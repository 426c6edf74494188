"""Survival at hospitals and in districts: alone, with one model for all, and partially pooled."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from consilience.algorithms import Algorithm, FedAvg, FedEP, PartialPooling
from consilience.core import Gaussian
from consilience.data import Federation
from consilience.engines import Simulator
from consilience.evaluation.predictions import predict_inputs
from consilience.inference import Newton
from consilience.metrics import concordant_pairs, integrated_brier
from consilience.optim import SGD
from consilience.recipes.base import Options, Recipe, finished, rows_of
from consilience.recipes.fedep_hospitals import Reference
from consilience.recipes.personal_setting import Table, names
from consilience.recipes.survival_setting import federation
from consilience.runs import Run, fit
from consilience.studies.comparison import Comparison
from consilience.studies.scores import paired_test
from consilience.tasks.supervised import Cox

STUDIES = ("liver", "leukaemia")
LOCAL, TOGETHER, POOLED = "LocalOnly", "FedEP", "Pooled"
TEXT = (
    "Cox's model, stratified by site, of two public studies with natural sites: primary biliary cirrhosis at six "
    "European hospitals (349 patients, 61 events, 8 covariates) and acute myeloid leukaemia in 24 districts of north- "
    "west England (1,043 patients, 879 events, 4 covariates). LocalOnly: every site alone with the prior N(0, 1). "
    "FedAvg: averaged weights. FedEP: one posterior for all. PartialPooling: coefficients of its own for every site "
    "around a common mean, with a learned width. Pooled: all records in one place, with one baseline hazard. All but "
    "FedAvg use the full Hessian. A seed is a random split with a third of every site's patients for test. "
    "“concordance” counts all pairs of test patients of the same site; “mean of sites” and “worst site” are those of "
    "sites with such pairs. “integrated Brier” is that of all test patients' survival curves with Breslow's baseline "
    "of their own site, up to a time that 80 % of the times do not exceed. A site without an event in the training "
    "data uses the baseline of all sites. Intervals of differences use the corrected variance of Nadeau and Bengio. "
    "“mean error” and “sd error” compare posteriors of all 349 patients with 100,000 draws of NUTS on their pooled "
    "data: the distance of the means in posterior standard deviations, and the relative error of standard deviations."
)
METRICS = ("concordance", "mean of sites", "integrated_brier")


def methods(quick: bool) -> dict[str, tuple[Algorithm, int]]:
    """Methods and their rounds. With its common mean fixed at 0, PartialPooling is every site alone."""
    alone = PartialPooling(Newton(), damping=1.0, prior=1e10, tau=1.0, parts="all", learn=False)
    average = FedAvg(SGD(lr=0.1, epochs=5, batch_size=1000))
    pooling = PartialPooling(Newton(), damping=1.0, prior=1.0, tau=0.1**0.5, parts="all")
    return {
        LOCAL: (alone, 3),
        "FedAvg": (average, 10 if quick else 100),
        TOGETHER: (FedEP(Newton(), damping=1.0, prior=1.0), 8),
        "PartialPooling": (pooling, 10 if quick else 40),
        POOLED: (FedEP(Newton(), damping=1.0, prior=1.0), 8),
    }


def learn(method: tuple[Algorithm, int], data: Federation) -> Run:
    """Cox's model from weights 0, by full batches."""
    module = nn.Linear(data.data.x.shape[1], 1, bias=False)
    nn.init.zeros_(module.weight)
    engine = Simulator(device="cpu", precision="float64", workers=1, threads=1)
    return fit(method[0], Cox(module), data, rounds=method[1], engine=engine, progress=False)


def score(table: Table, label: str, suffix: str, run: Run, test: Federation, horizon: float) -> None:
    """Add the scores of a split: every test patient is predicted at the own site."""
    times = torch.linspace(0, horizon, 51, dtype=torch.float64)[1:]
    curves: list[Tensor] = []
    right, pairs, own = 0.0, 0, {}
    for name in names(test):
        data, here = test.client(name), at_home(run, name)
        belief = run.personal(name) if name in names(run.federation) else run.posterior
        risk = predict_inputs(run.network, belief, data.x, point=True)
        found = concordant_pairs(risk, data.y)
        right, pairs = right + found[0], pairs + found[1]
        if found[1]:
            own[name] = found[0] / found[1]
            table.add(label, {"concordance": own[name]}, suffix, name)
        draws = 200 if isinstance(belief, Gaussian) else 0
        curves.append(run.survival(data.x, client=here, times=times, samples=draws).mean)
    y = test.data.y[torch.cat([test.indices(k) for k in range(len(test))])]
    scores = {"concordance": right / pairs, "mean of sites": sum(own.values()) / len(own)}
    scores |= {"worst site": min(own.values()), "integrated_brier": integrated_brier(torch.cat(curves), y, times)}
    table.add(label, scores | run.algorithm.facts(run.server) if label == "PartialPooling" else scores, suffix)


def at_home(run: Run, name: str) -> str | None:
    """The site if the run has a baseline hazard for it."""
    if name not in names(run.federation):
        return None
    return name if bool((run.federation.client(name).y[:, 1] > 0).any()) else None


def run(options: Options) -> Comparison:
    """Every method on every split of both studies, and the posterior of one against NUTS."""
    start, table, overlap = time.perf_counter(), Table(), {}
    for study in STUDIES:
        sites = federation(study)
        horizon = float(sites.data.y[:, 0].quantile(0.8))
        for seed in range(options.seeds):
            train, test = sites.split(1 / 3, seed=seed)
            overlap[f", {study}"] = test.examples / train.examples
            for label, method in methods(options.quick).items():
                options.tell(f"{label}, {study}", seed)
                learned = learn(method, train.pooled() if label == POOLED else train)
                score(table, label, f", {study}", learned, test, horizon)
    exact = learn(methods(options.quick)[TOGETHER], federation("liver"))
    table.add(TOGETHER, Reference.read("survival_posterior").errors(exact))
    return finished(
        "survival", "Survival at hospitals and in districts", TEXT, options, rows_of(table.scores), [], start,
        per_client=table.per_client(), over="splits",
        scores=[{"method": label, "metric": metric, "values": values}
                for (label, metric), values in table.scores.items()],
        paired=paired(table, overlap),
    )  # fmt: skip


def paired(table: Table, overlap: dict[str, float]) -> list[dict[str, Any]]:
    """Differences to LocalOnly and FedEP."""
    entries = []
    for (method, metric), values in table.scores.items():
        suffix = next((end for end in overlap if metric.endswith(end)), "")
        if not suffix or metric.removesuffix(suffix) not in METRICS:
            continue
        for versus in (LOCAL, TOGETHER):
            if method not in (LOCAL, versus):
                pairs = list(zip(values, table.scores[versus, metric], strict=True))
                found = paired_test(pairs, overlap=overlap[suffix])
                entries.append({"method": method, "versus": versus, "metric": metric, **found})
    return entries


RECIPE = Recipe("survival", "Survival at hospitals and in districts: alone, together, partially pooled", run,
                seeds=20, quick_seeds=1)  # fmt: skip
