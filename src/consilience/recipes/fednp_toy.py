"""FedNP's first example: three clients see three pieces of a parabola, and fit a cubic together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from consilience.algorithms import SCAFFOLD, FedAvg, FedNP, FedPA, FedProx, Pooled
from consilience.algorithms.base import Algorithm
from consilience.core import keys
from consilience.core.ranges import Range
from consilience.core.records import rows as of_clients
from consilience.data import Dataset, Federation
from consilience.data.cohort import Cohort
from consilience.engines import Simulator
from consilience.figures.panels import Curve, Mark, Panel, Panels
from consilience.metrics import spread
from consilience.optim import RMSprop
from consilience.recipes.base import Options, Recipe
from consilience.recipes.fedep import seeded
from consilience.runs.fit import fit
from consilience.runs.run import Run
from consilience.studies.compare import Comparison, Row, paired_test
from consilience.studies.tune import Settings, with_settings
from consilience.tasks.supervised import Regression

PIECES = ((-7.0, -5.0, 30), (-2.0, 2.0, 20), (4.0, 8.0, 50))
TRUTH = torch.tensor([5.0, 2.0, -1.0, 0.0], dtype=torch.float64)
NOISE = 5.0
ROUNDS = 10
ENGINE = Simulator(device="cpu", chunk=len(PIECES), workers=1, threads=1)
FIT, POOLED, FEDAVG, FEDNP, ABLATION = "Pooled fit", "Pooled", "FedAvg", "FedNP", "FedNP, f = 0"
MSE, TUNED = "mse", "mse, tuned"
PAPER = {FEDAVG: 116.5, "FedProx": 117.1, "SCAFFOLD": 100.5, "FedPA": 97.9, FEDNP: 72.4}
TEXT = (
    "y = −x² + 2x + 5 with noise of deviation 5, at three clients: 30 points in [−7, −5], 20 in [−2, 2], 50 in [4, 8]. "
    "The model is a cubic in x as it is, four coefficients, from random ones. RMSprop 0.01 in batches of 10, one local "
    "epoch, ten rounds; the error is that on all clients' training data, as in the paper. A seed is another draw of "
    "data and first coefficients. “mse” has the paper's steps, and the best of eleven strengths for the "
    "methods that have one (FedProx's μ, FedNP's λ), which the paper does not give; in “mse, tuned” the sizes of the "
    "clients' and the server's steps are searched, too, with as many trials for everyone. Settings are chosen on other "
    "federations of the same kind, by points that nobody has learned from. “Pooled fit” is least squares; “Pooled” has "
    "all data in one place and takes the same ten epochs of RMSprop. “mse of μ” is the error of the mean of N(μ, v), "
    "FedNP's distribution of the coefficients. FedPA has one sample in an epoch, and so is FedAvg with mean iterates."
)


class Cubic(nn.Module):
    """w₀ + w₁x + w₂x² + w₃x³, features as they are: x³ reaches 512."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(len(TRUTH), 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 1] to [N, 1]."""
        out: Tensor = self.linear(powers(x))
        return out


def powers(x: Tensor) -> Tensor:
    """(1, x, x², x³) of x [..., 1]."""
    return torch.cat([torch.ones_like(x), x, x * x, x * x * x], -1)


def federation(seed: int) -> Federation:
    """Three clients, each with its piece."""
    rng, silos = np.random.default_rng(seed), {}
    for number, (low, high, count) in enumerate(PIECES, 1):
        x = torch.from_numpy(rng.uniform(low, high, (count, 1)))
        y = powers(x) @ TRUTH.unsqueeze(1) + NOISE * torch.from_numpy(rng.normal(size=(count, 1)))
        silos[f"client {number}"] = Dataset(x.float(), y.float(), name="pieces of a parabola")
    return Federation.from_silos(silos)


def mse(w: Tensor, data: Dataset) -> float:
    """Of a cubic with coefficients w [4]."""
    return float((powers(data.x.double()) @ w.double() - data.y[:, 0]).square().mean())


def least_squares(data: Dataset) -> Tensor:
    """The coefficients with the least error."""
    found: Tensor = torch.linalg.lstsq(powers(data.x.double()), data.y.double()).solution
    return found[:, 0]


def methods() -> dict[str, Algorithm]:
    """With the paper's steps. What f hears are losses, half the squared residuals in units of the noise; sites are
    replaced at once (δ = 1)."""
    train = RMSprop(lr=0.01, batch_size=10)
    latent = FedNP(train, latent=1, bound=1.0, signal="losses", signal_hidden=10, damping=1.0)
    return {
        POOLED: Pooled(train),
        FEDAVG: FedAvg(train),
        "FedProx": FedProx(train),
        "SCAFFOLD": SCAFFOLD(train, variate="gradient"),
        "FedPA": FedPA(train),
        FEDNP: latent,
        ABLATION: replace(latent, signal="nothing"),
    }


def coefficients(run: Run) -> Tensor:
    """What the server has learned, [4]."""
    return run.posterior.mean[run.task.slice(parameter="linear.weight")]


@dataclass(frozen=True)
class Learned:
    """One run, and the coefficients after every round, [rounds, 4]."""

    run: Run
    path: Tensor

    def predicted(self) -> Tensor | None:
        """μ, if the method has one."""
        if not isinstance(self.run.algorithm, FedNP):
            return None
        return self.run.algorithm.weights(self.run.task, cast(Any, self.run.server)).mean


def learn(method: Algorithm, seed: int) -> Learned:
    """Ten rounds on the federation of a seed."""
    path: list[Tensor] = []
    run = fit(
        method,
        Regression(seeded(seed, Cubic), noise=NOISE),
        federation(seed),
        rounds=ROUNDS,
        seed=seed,
        engine=ENGINE,
        progress=False,
        callbacks=[lambda run, _: path.append(coefficients(run).clone())],
    )
    return Learned(run, torch.stack(path))


# Features of order one would want strengths below 1. Here the curvature of the loss is E[x⁶]/25, about 2,000.
STRENGTHS, NEAR = Range(1e-2, 1e3), 10**0.5
STRENGTH = {"FedProx": "mu", FEDNP: "strength", ABLATION: "strength"}
STEPS = {"train.lr": Range(1e-3, 3e-2), "server.lr": Range(0.1, 1.5, log=False)}
OTHERS, UNSEEN = 10_000, 20_000  # seeds of federations to choose settings on, and of points to judge them by


@dataclass(frozen=True)
class Effort:
    """How much is tried: strengths with the paper's steps, then trials of everything, on the `first` federations. The
    best few, `left`, are tried again on the `last` ones, which decide: errors differ much between federations, and the
    best of many on a few of them was lucky there."""

    strengths: int
    trials: int
    first: range
    left: int
    last: range


FULL = Effort(11, 16, range(OTHERS, OTHERS + 4), 3, range(OTHERS + 4, OTHERS + 16))
QUICK = Effort(2, 2, range(OTHERS, OTHERS + 1), 1, range(OTHERS + 1, OTHERS + 2))


def score(method: Algorithm, seeds: range) -> float:
    """The mean error on points that nobody has learned from."""
    return statistics.fmean(mse(learn(method, seed).path[-1], federation(UNSEEN + seed).data) for seed in seeds)


def grid(label: str, count: int) -> list[Settings]:
    """Strengths from the weakest to the strongest; nothing else."""
    if label not in STRENGTH:
        return [{}]
    return [{STRENGTH[label]: STRENGTHS.at(index / (count - 1))} for index in range(count)]


def draws(label: str, method: Algorithm, count: int) -> list[Settings]:
    """The method as it is, then step sizes at random, the same draws for everyone, and strengths near its own."""
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
    """The method with the best settings, and what was tried with its first scores, as comparison.json has it."""
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
    """Strengths, then step sizes, then every seed with both."""
    start, effort = time.perf_counter(), QUICK if options.quick else FULL
    announce = options.announce or (lambda method, seed: None)
    tuning: dict[str, list[dict[str, Any]]] = {MSE: [], TUNED: []}
    found: dict[str, Runs] = {MSE: {}, TUNED: {}}
    for label, method in methods().items():
        announce(f"tuning {label}", 0)
        fixed, entry = best(label, method, grid(label, effort.strengths), effort)
        tuning[MSE].append(entry)
        free, entry = best(f"{label}, tuned", fixed, draws(label, fixed, effort.trials), effort)
        tuning[TUNED].append(entry)
        for metric, chosen in ((MSE, fixed), (TUNED, free)):
            found[metric][label] = []
            for seed in range(options.seeds):
                announce(label, seed)
                again = metric == TUNED and free == fixed
                found[metric][label].append(found[MSE][label][seed] if again else learn(chosen, seed))
    data = [federation(seed).data for seed in range(options.seeds)]
    scores = tabled(found, data)
    result = Comparison(
        "A cubic from three pieces",
        TEXT,
        options.command("fednp-toy"),
        rows=[
            Row(method, metric, *spread(values), len(values), PAPER.get(method) if metric == MSE else None)
            for (method, metric), values in scores.items()
        ],
        figures=[curve_figure(found[MSE]), course_figure(found[MSE], tuning[MSE], data)],
        scores=[{"method": method, "metric": metric, "values": values} for (method, metric), values in scores.items()],
        paired=paired(scores),
        tuning=[entry for entry in (*tuning[MSE], *tuning[TUNED]) if entry["trials"] > 1],
    )
    result.seconds = time.perf_counter() - start
    result.save(options.out)
    return result


def tabled(found: dict[str, Runs], data: Sequence[Dataset]) -> dict[tuple[str, str], list[float]]:
    """Every score in every seed, by method and metric."""
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


def paired(scores: dict[tuple[str, str], list[float]]) -> list[dict[str, Any]]:
    """How far FedNP is from every other method, seed by seed."""
    entries = []
    for (method, metric), values in scores.items():
        if metric in (MSE, TUNED) and method not in (FIT, FEDNP):
            pairs = list(zip(scores[FEDNP, metric], values, strict=True))
            entries.append({"method": FEDNP, "versus": method, "metric": metric, **paired_test(pairs)})
    return entries


def local(run: Run, seed: int) -> dict[str, Tensor]:
    """The coefficients of every client after one more epoch: what the server would have, had that client alone
    answered."""
    clients, algorithm = run.federation, run.algorithm
    ids = clients.sizes.argsort(descending=True)
    cohort = Cohort(clients, ids, round=ROUNDS + 1, round_size=len(ids), seed=seed)
    message = algorithm.message(run.server, ids)
    update, _ = algorithm.local(run.task, message, run.states.gather(ids), cohort)
    where, found = run.task.slice(parameter="linear.weight"), {}
    for row, client in enumerate(ids.tolist()):
        server = algorithm.fuse(run.server, of_clients(update, row))
        found[clients.name(client)] = algorithm.posterior(server).mean[where]
    return dict(sorted(found.items()))


def drawn(label: str, x: Tensor, w: Tensor) -> Curve:
    """A cubic."""
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
        "Left and centre: crosses are means of five neighbouring points of the first seed's data; the dashed lines are "
        "the clients' own cubics after one more epoch from the global one. Right: the cubics of N(μ, v), the mean and "
        "three standard deviations on both sides. The mean of KL(N(μ, v) ‖ N(w, ε)) is least at v = ε, here 1, "
        "whatever the data: the band shows the choice of ε, and not how much is known."
    )
    return Panels("Three pieces and one cubic", caption, panels)


def means_of_five(data: Dataset) -> Iterable[Mark]:
    """A client's points, a few at a time."""
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
        "Left: the error after every round, the mean over seeds, with the paper's steps. Right: the error on unseen "
        "points for every strength that was tried; FedProx's μ, FedNP's λ."
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
