"""FedNP's toy regression: its settings, table and figures. The problem itself is in parabola.py."""

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from consilience.algorithms import Algorithm, FedNP
from consilience.core import Range, keys
from consilience.data import Dataset
from consilience.figures.panels import Curve, Mark, Panel, Panels
from consilience.recipes.base import Options, Recipe, Scores, finished, rows_of
from consilience.recipes.parabola import (
    ABLATION,
    FEDAVG,
    FEDNP,
    FIT,
    PIECES,
    ROUNDS,
    Learned,
    federation,
    learn,
    least_squares,
    local,
    methods,
    mse,
    powers,
    variants,
)
from consilience.studies.comparison import Comparison
from consilience.studies.knobs import Settings, with_settings
from consilience.studies.scores import paired_test

MSE, TUNED, SAME = "mse", "mse, tuned", "mse, λ = 10"
PAPER = {FEDAVG: 116.5, "FedProx": 117.1, "SCAFFOLD": 100.5, "FedPA": 97.9, FEDNP: 72.4}
TEXT = (
    "y = −x² + 2x + 5 with noise of deviation 5, at three clients: 30 points in [−7, −5], 20 in [−2, 2], 50 in [4, 8]. "
    "The model is a cubic in unscaled x with four coefficients, drawn at random. RMSprop 0.01 in batches of 10, one "
    "local epoch, ten rounds; the error is that on all clients' training data, as in the paper. A seed draws data, "
    "initial coefficients and the weights of FedNP's networks. “mse” has the paper's step sizes and the best of eleven "
    "strengths for methods that have one (FedProx's μ, FedNP's λ), which the paper does not give. For “mse, tuned” the "
    "clients' and the server's step sizes are searched as well, with the same number of trials for each method. "
    "Settings are chosen on other federations of the same kind, by points outside their training data. “mse, λ = 10” "
    "compares variants of FedNP at one strength. “Pooled fit” is least squares; “Pooled” has all data in one place and "
    "takes the same ten epochs of RMSprop. “mse of μ” is the error of the mean of N(μ, v), FedNP's prediction of the "
    "coefficients. FedPA has one sample in an epoch, so it is FedAvg with mean iterates."
)


# Features of order one would want strengths below 1. Here the curvature of the loss is E[x⁶]/25, about 2,000.
STRENGTHS, NEAR = Range(1e-2, 1e3), 10**0.5
STRENGTH = {"FedProx": "mu", FEDNP: "strength", ABLATION: "strength"}
STEPS = {"train.lr": Range(1e-3, 3e-2), "server.lr": Range(0.1, 1.5, log=False)}
OTHERS, UNSEEN = 10_000, 20_000  # seeds of federations to choose settings on, and of points to judge them by


@dataclass(frozen=True)
class Effort:
    """The search: strengths with the paper's steps, then trials of all settings, on the `first` federations. The best
    few, `left`, are tried again on the `last` federations, which decide: errors differ much between federations, and
    the best of many trials on a few federations is partly chance."""

    strengths: int
    trials: int
    first: range
    left: int
    last: range


FULL = Effort(11, 16, range(OTHERS, OTHERS + 4), 3, range(OTHERS + 4, OTHERS + 16))
QUICK = Effort(2, 2, range(OTHERS, OTHERS + 1), 1, range(OTHERS + 1, OTHERS + 2))


def score(method: Algorithm, seeds: range) -> float:
    """The mean error on points outside the training data."""
    return statistics.fmean(mse(learn(method, seed).path[-1], federation(UNSEEN + seed).data) for seed in seeds)


def grid(label: str, count: int) -> list[Settings]:
    """Strengths from the weakest to the strongest, if the method has one."""
    if label not in STRENGTH:
        return [{}]
    return [{STRENGTH[label]: STRENGTHS.at(index / (count - 1))} for index in range(count)]


def draws(label: str, method: Algorithm, count: int) -> list[Settings]:
    """The method as it is, then random step sizes, the same for all methods, and strengths near its own."""
    ranges = {path: within for path, within in STEPS.items() if hasattr(method, path.split(".")[0])}
    if label in STRENGTH:
        own = getattr(method, STRENGTH[label])
        ranges[STRENGTH[label]] = Range(own / NEAR, own * NEAR)
    found: list[Settings] = [{}]
    for trial in range(1, count):
        drawn = {}
        for path, within in ranges.items():
            purpose = f"tuning {path if path in STEPS else 'strength'}"
            drawn[path] = within.at(float(keys.uniform(keys.key(0, purpose=purpose, round=trial).view(1), 1)))
        found.append(drawn)
    return found


def best(label: str, method: Algorithm, tried: Sequence[Settings], effort: Effort) -> tuple[Algorithm, dict[str, Any]]:
    """The method with the best settings, and the trials with their first scores for comparison.json."""
    entry = {"method": label, "trials": len(tried), "metric": MSE}
    if len(tried) == 1:
        return method, entry
    versions: list[Algorithm] = [with_settings(method, settings) for settings in tried]
    first = [score(version, effort.first) for version in versions]
    left = sorted(range(len(tried)), key=lambda trial: first[trial])[: effort.left]
    last = {trial: score(versions[trial], effort.last) if len(left) > 1 else first[trial] for trial in left}
    chosen = min(left, key=lambda trial: last[trial])
    entry["all"] = [{"settings": settings, "score": found} for settings, found in zip(tried, first, strict=True)]
    return versions[chosen], {**entry, "chosen": tried[chosen], "score": last[chosen]}


Runs = dict[str, list[Learned]]


def run(options: Options) -> Comparison:
    """Choose strengths, then step sizes; then run every seed with both, and the variants."""
    start, effort = time.perf_counter(), QUICK if options.quick else FULL
    tuning: dict[str, list[dict[str, Any]]] = {MSE: [], TUNED: []}
    found: dict[str, Runs] = {MSE: {}, TUNED: {}}
    for label, method in methods().items():
        options.tell(f"tuning {label}", 0)
        fixed, entry = best(label, method, grid(label, effort.strengths), effort)
        tuning[MSE].append(entry)
        free, entry = best(f"{label}, tuned", fixed, draws(label, fixed, effort.trials), effort)
        tuning[TUNED].append(entry)
        found[MSE][label] = learned(label, fixed, options)
        found[TUNED][label] = found[MSE][label] if free == fixed else learned(label, free, options)
    found[SAME] = {label: learned(label, method, options) for label, method in variants(10.0).items()}
    data = [federation(seed).data for seed in range(options.seeds)]
    scores = tabled(found, data)
    return finished(
        "fednp-toy", "A cubic from three pieces", TEXT, options,
        rows_of(scores, {(method, MSE): value for method, value in PAPER.items()}),
        [curve_figure(found[MSE]), course_figure(found[MSE], tuning[MSE], data)], start,
        scores=[{"method": method, "metric": metric, "values": values} for (method, metric), values in scores.items()],
        paired=paired(scores), tuning=[entry for entry in (*tuning[MSE], *tuning[TUNED]) if entry["trials"] > 1],
    )  # fmt: skip


def learned(label: str, method: Algorithm, options: Options) -> list[Learned]:
    """A run for each seed."""
    runs = []
    for seed in range(options.seeds):
        options.tell(label, seed)
        runs.append(learn(method, seed))
    return runs


def tabled(found: dict[str, Runs], data: Sequence[Dataset]) -> dict[tuple[str, str], list[float]]:
    """The scores of all seeds by method and metric."""
    fits = [least_squares(one) for one in data]
    scores = {(FIT, MSE): [mse(w, one) for w, one in zip(fits, data, strict=True)]}
    for metric, by_method in found.items():
        for method, learned in by_method.items():
            scores[method, metric] = [mse(one.path[-1], two) for one, two in zip(learned, data, strict=True)]
    scores[FIT, "x² coefficient"] = [float(w[2]) for w in fits]
    for method, learned in found[MSE].items():
        scores[method, "x² coefficient"] = [float(one.path[-1, 2]) for one in learned]
        means = [(one.predicted(), two) for one, two in zip(learned, data, strict=True)]
        if values := [mse(mean, two) for mean, two in means if mean is not None]:
            scores[method, "mse of μ"] = values
    return scores


def paired(scores: Scores) -> list[dict[str, Any]]:
    """Paired tests of FedNP against each other method, over seeds."""
    entries = []
    for (method, metric), values in scores.items():
        if metric in (MSE, TUNED, SAME) and method not in (FIT, FEDNP):
            pairs = list(zip(scores[FEDNP, metric], values, strict=True))
            entries.append({"method": FEDNP, "versus": method, "metric": metric, **paired_test(pairs)})
    return entries


def drawn(label: str, x: Tensor, w: Tensor) -> Curve:
    """The curve of a cubic."""
    return Curve(label, x.tolist(), (powers(x.double().unsqueeze(1)) @ w.double()).tolist())


def curve_figure(found: Runs) -> Panels:
    """The first seed: local curves around the global one, and the distribution of the coefficients."""
    learned = {method: found[method][0] for method in (FEDAVG, FEDNP)}
    silos = learned[FEDAVG].run.federation
    marks = [mark for client in range(len(silos)) for mark in means_of_five(silos.client(client))]
    x = torch.linspace(PIECES[0][0], PIECES[-1][1], 61)
    best_fit, panels = drawn(FIT, x, least_squares(silos.data)), []
    for method, one in learned.items():
        alone = [drawn(name, x, w) for name, w in local(one.run, 0).items()]
        panels.append(Panel(method, [best_fit, *alone, drawn(method, x, one.path[-1])], marks, x_label="x"))
    run = learned[FEDNP].run
    weights = cast(FedNP, run.algorithm).weights(run.task, cast(Any, run.server))
    mean = drawn(FEDNP, x, weights.mean)
    deviation = (powers(x.double().unsqueeze(1)).square() @ weights.variance.double()).sqrt()
    band = [
        Curve(label, mean.x, (torch.tensor(mean.y, dtype=torch.float64) + times * deviation).tolist())
        for label, times in (("+3 sd", 3), ("−3 sd", -3))
    ]
    panels.append(Panel("FedNP's distribution", [best_fit, *band, mean], x_label="x"))
    caption = (
        "Left and centre: crosses are means of five neighbouring points of the first seed's data; dashed lines are the "
        "clients' own cubics after one more epoch from the global one. Right: the cubics of N(μ, v), the mean and "
        "three standard deviations on both sides. The mean of KL(N(μ, v) ‖ N(w, ε)) is least at v = ε, here 1, for any "
        "data: the band shows the choice of ε, not what the data determine."
    )
    return Panels("Three pieces and one cubic", caption, panels)


def means_of_five(data: Dataset) -> Iterable[Mark]:
    """The means of five neighbouring points at a time."""
    order = data.x[:, 0].argsort()
    for first in range(0, len(order), 5):
        part = order[first : first + 5]
        yield Mark("data", float(data.x[part].mean()), float(data.y[part].mean()))


def course_figure(found: Runs, tuning: Sequence[dict[str, Any]], data: Sequence[Dataset]) -> Panels:
    """Errors by round, and by strength."""
    by_round, rounds = [], [float(number) for number in range(1, ROUNDS + 1)]
    for method, learned in found.items():
        errors = [[mse(w, two) for w in one.path] for one, two in zip(learned, data, strict=True)]
        by_round.append(Curve(method, rounds, [statistics.fmean(column) for column in zip(*errors, strict=True)]))
    by_strength = []
    for entry in tuning:
        if entry["trials"] > 1:
            strengths = [trial["settings"][STRENGTH[entry["method"]]] for trial in entry["all"]]
            scores = [trial["score"] for trial in entry["all"]]
            by_strength.append(Curve(entry["method"], np.log10(strengths).tolist(), scores))
    caption = (
        "Left: the error after each round, the mean over seeds, with the paper's steps. Right: the error on unseen "
        "points for each strength; FedProx's μ, FedNP's λ."
    )
    return Panels(
        "By round and by strength",
        caption,
        [
            Panel("Mean squared error", by_round, x_label="round", log=True),
            Panel("Choosing a strength", by_strength, x_label="log₁₀ strength", log=True),
        ],
    )


RECIPE = Recipe("fednp-toy", "FedNP's toy: a cubic from three pieces of a parabola", run, seeds=20)
