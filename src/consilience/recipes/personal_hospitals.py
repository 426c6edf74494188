"""Personal posteriors at four hospitals: at home, for a hospital that joins or has no labels, and after forgetting."""

from __future__ import annotations

import time
from typing import Any

import torch

from consilience.data import Federation
from consilience.figures.panels import Curve, Panel, Panels
from consilience.metrics import spread
from consilience.recipes.base import Options, Recipe, finished, rows_of
from consilience.recipes.personal_members import joining, leaving
from consilience.recipes.personal_setting import (
    DRAWS,
    LOCAL,
    POOLED,
    Table,
    hospitals,
    labelled,
    learn,
    methods,
    names,
    scored,
)
from consilience.runs import Run
from consilience.studies.comparison import Comparison
from consilience.studies.scores import paired_test

HELD_OUT = {"": 0.25, " (20 % of the data)": 0.8}  # the share of test patients, by the suffix of the scores
TEXT = (
    "Bayesian logistic regression on 29 features at Cleveland, Hungary, Switzerland and Long Beach. LocalOnly: every "
    "hospital alone with the prior N(0, 1). FedEP: one posterior for all. The others are PartialPooling: every "
    "hospital has weights of its own around a common mean, with one learned width τ for all weights or one for weights "
    "and one for biases, by maximum likelihood (ML) or with a prior of τ² that counts as 4 values of size 0.1. All use "
    "the full Hessian; predictions average 200 draws of a posterior. At home, a seed is a random split with a quarter "
    "of every hospital for test, or four fifths (20 % of the data); scores pool all test patients, each predicted by "
    "the posterior of its own hospital. "
    "“m =”: a hospital joins a run of the three others with m labelled patients; half of its patients are the test "
    "data; a seed is another draw. “new”: a hospital has no labels, and the three others (three quarters of their "
    "patients) predict for it, as they are, with class frequencies estimated from its inputs (EM), with its true "
    "frequencies, or with the logit shift that fits its labels best, an oracle. Scores of joining and new hospitals "
    "are means over the four hospitals. “apart”: the distance of the other hospitals' posterior means, after one was "
    "forgotten, from a run that never had it, in posterior standard deviations; “nll apart” is the absolute difference "
    "of their NLL. “wins” is the share of seeds with a lower NLL than FedEP. Splits share patients, so the intervals "
    "of differences use the corrected variance of Nadeau and Bengio; those of joining hospitals have none."
)


def at_home(options: Options, table: Table) -> dict[str, float]:
    """Every method on every split, trained on three quarters of the patients and on a fifth of them. Returns n_test /
    n_train by the suffix of its scores."""
    overlaps = {}
    for seed in range(options.seeds):
        for suffix, share in HELD_OUT.items():
            train, test = hospitals().split(share, seed=seed)
            overlaps[suffix] = test.examples / train.examples
            for label, method in methods(options.quick).items():
                options.tell(f"{label}{suffix}", seed)
                home_scores(label, suffix, learn(method, train), test, table)
    return overlaps


def home_scores(label: str, suffix: str, run: Run, test: Federation, table: Table) -> None:
    """Add the scores of the test patients, each predicted by the posterior of its own hospital."""
    probs, y = [], []
    for name in names(test):
        own = test.client(name)
        probs.append(run.predict(own.x, client=name, samples=DRAWS))
        y.append(own.y)
        table.add(label, scored(probs[-1], own.y, "accuracy", "nll"), suffix, name)
    table.add(label, scored(torch.cat(probs), torch.cat(y), "accuracy", "nll", "auroc"), suffix)
    table.add(label, run.algorithm.facts(run.server) if label != LOCAL else {}, suffix)


def paired(table: Table, overlaps: dict[str, float]) -> list[dict[str, Any]]:
    """Differences of the NLL to FedEP and LocalOnly at home, and to FedEP at a hospital that joins."""
    entries = []
    for (method, metric), values in table.scores.items():
        home = next((overlap for suffix, overlap in overlaps.items() if metric == f"nll{suffix}"), None)
        joins = metric.startswith("nll, m =")
        for versus in (POOLED, LOCAL):
            if method in (POOLED, versus) or (home is None and not (joins and versus == POOLED)):
                continue
            pairs = list(zip(values, table.scores[versus, metric], strict=True))
            found = paired_test(pairs, overlap=home or 0.0)
            if joins:
                found |= {"t": None, "low": None, "high": None, "p": None}
            wins = sum(a < b for a, b in pairs)
            entries.append({"method": method, "versus": versus, "metric": metric, **found, "wins": wins})
    return entries


def figure(table: Table, quick: bool) -> Panels:
    """The NLL of a hospital that joins, over its number of labelled patients."""
    few = labelled(quick)
    curves = [
        Curve(label, list(map(float, few)), [spread(table.scores[label, f"nll, m = {m}"])[0] for m in few])
        for label in methods(quick)
    ]
    caption = "NLL at a hospital that joins the run of three others, over its number of labelled patients."
    return Panels("A hospital joins", caption, [Panel("nll", curves, x_label="labelled patients")])


def run(options: Options) -> Comparison:
    """All four parts of the study."""
    start, table = time.perf_counter(), Table()
    overlaps = at_home(options, table)
    joining(options, table)
    leaving(options, table)
    return finished(
        "personal-hospitals", "Personal posteriors of four hospitals", TEXT, options,
        rows_of(table.scores) + table.wins(), [figure(table, options.quick)], start,
        per_client=table.per_client(), over="splits",
        scores=[{"method": label, "metric": metric, "values": values}
                for (label, metric), values in table.scores.items()],
        paired=paired(table, overlaps),
    )  # fmt: skip


RECIPE = Recipe(
    "personal-hospitals", "A posterior for every hospital: at home, joining, without labels, forgotten", run,
    seeds=30, quick_seeds=2,
)  # fmt: skip
