"""PFNM's experiments: clients train alone, talk once, and the server makes one network of theirs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import nn

from consilience.algorithms import PFNM, Downpour, Ensemble, FedAvg
from consilience.algorithms.base import Algorithm
from consilience.algorithms.shared.one_shot import Update
from consilience.core.beliefs import Belief
from consilience.core.files import write_atomically
from consilience.core.records import Point
from consilience.data import Data, Dataset, Federation, load, partition
from consilience.data.cohort import Info
from consilience.evaluation.scores import evaluate
from consilience.figures.panels import Curve, Panel, Panels
from consilience.matching import BetaBernoulli, Clusterer, DPMeans
from consilience.metrics import spread
from consilience.models import mlp
from consilience.optim import AMSGrad
from consilience.recipes.base import Options, Recipe, finished, seeded
from consilience.runs.fit import fit
from consilience.runs.run import Run
from consilience.server.optimizers import Adam
from consilience.studies.comparison import Comparison, Row
from consilience.studies.distil import distil
from consilience.tasks.supervised import Classification
from consilience.tasks.task import Task

Scores = dict[str, dict[str, float]]  # by method and metric
MNIST = AMSGrad(lr=0.01, epochs=10, batch_size=32, weight_decay=1e-6)
CIFAR10 = AMSGrad(lr=0.001, epochs=10, batch_size=32, weight_decay=1e-5)
SPLITS = ("heterogeneous", "homogeneous")
PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0)  # of DP-means
VARIANCES, MASSES = (0.1, 0.5, 1.0), (1e-3, 1.0, 50.0)  # the authors' grid of σ² and γ₀
METRICS = ("accuracy", "nll", "ece", "width")
QUICK = 50  # the small size has every fiftieth example
NARROW = 20  # hidden units in a quick run
TEXT = (
    "Clients train networks of their own and talk to the server once. “heterogeneous”: every class is shared out by "
    "Dirichlet 0.5, sizes balanced, as in the authors' code. PFNM has σ² = 1, σ₀² = 10, γ₀ = 1; “tuned” are σ² and γ₀ "
    "from the authors' grid that are best on training data, and so is the penalty of DP-means, one of five. FedAvg "
    "starts all clients at the same weights and has three times their width. “local average” is the mean score of the "
    "clients' own networks. The last four methods have more than one network to predict with (ensembles), all inputs "
    "in one place (distillation, 500 units a layer), or ten rounds (downpour SGD). “width” counts the hidden units "
    "that a prediction needs."
)


@dataclass(frozen=True)
class Case:
    """A federation of local networks: one point of a figure."""

    split: str
    clients: int
    hidden: tuple[int, ...]
    seed: int

    @property
    def slug(self) -> str:
        """Names the file of its scores."""
        return f"{self.split}-{self.clients}-{'x'.join(map(str, self.hidden))}-{self.seed}"


@dataclass(frozen=True)
class Trained:
    """Local networks, and what they were trained on."""

    case: Case
    data: Data
    federation: Federation
    ensemble: Run
    train: AMSGrad

    @property
    def task(self) -> Task:
        """One client's."""
        return self.ensemble.task

    @property
    def inputs(self) -> Sequence[int]:
        """The shape of an example."""
        return self.data.train.x.shape[1:]

    @property
    def networks(self) -> Update:
        """As clients would send them."""
        server = self.ensemble.server
        return Update(server.theta, server.labels, torch.arange(len(server.theta)))

    def fused(self, method: PFNM) -> tuple[Task, Point]:
        """What a method makes of them, and the network it is about."""
        numbers = (torch.tensor(n) for n in (self.case.seed, self.case.clients, self.federation.examples))
        server = method.fuse(method.start(self.task, Info(self.task.initial(), *numbers)), self.networks)
        return method.network(self.task, server), method.posterior(server)

    def fitted(self, method: Algorithm, hidden: Sequence[int], rounds: int) -> dict[str, float]:
        """The scores of a method that trains networks of `hidden` layers itself."""
        task = Classification(network(self.inputs, hidden, self.case.seed))
        run = fit(method, task, self.federation, rounds=rounds, seed=self.case.seed, progress=False)
        return self.scored(run.task, run.posterior)

    def scored(self, task: Task, belief: Belief, data: Dataset | None = None) -> dict[str, float]:
        """Accuracy and calibration on test data, or on others; and the hidden units of the network."""
        layers = [layer.out_features for layer in task.module.modules() if isinstance(layer, nn.Linear)]
        return {**evaluate(task, belief, data or self.data.test).point, "width": float(sum(layers[:-1]))}


def network(inputs: Sequence[int], hidden: Sequence[int], seed: int) -> nn.Module:
    """An MLP with weights N(0, 0.1²) and biases 0.1, as the authors start theirs."""

    def make() -> nn.Module:
        module = mlp(inputs, 10, hidden)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else nn.init.constant_(parameter, 0.1)
        return module

    return seeded(seed, make)


def loaded(name: str, quick: bool) -> Data:
    """A data set, or a part of it."""
    data = load(name)
    if not quick:
        return data
    parts = (part[::QUICK] for part in (data.train, data.test))
    return Data(*parts)


def shared_out(data: Dataset, case: Case) -> Federation:
    """The authors' two splits."""
    if case.split == "homogeneous":
        return partition.iid(data, case.clients, seed=case.seed)
    return partition.dirichlet(data, case.clients, alpha=0.5, seed=case.seed, minimum=10, balanced=True)


def trained(case: Case, name: str, train: AMSGrad, quick: bool) -> Trained:
    """Every client alone."""
    data = loaded(name, quick)
    federation = shared_out(data.train, case)
    task = Classification(network(data.train.x.shape[1:], case.hidden, case.seed))
    run = fit(Ensemble(train), task, federation, rounds=1, seed=case.seed, progress=False)
    return Trained(case, data, federation, run, train)


def best_of(local: Trained, choices: Sequence[Clusterer]) -> dict[str, float]:
    """The clustering that is best on training data: what a server could not know, but the paper did."""
    some = local.data.train[:: max(1, len(local.data.train) // 5000)]
    tried = [local.fused(PFNM(how=how)) for how in choices]
    accuracies = [local.scored(task, belief, some)["accuracy"] for task, belief in tried]
    task, belief = tried[accuracies.index(max(accuracies))]
    return local.scored(task, belief)


def averaged_once(local: Trained) -> dict[str, float]:
    """FedAvg from shared weights, three times as wide, one round."""
    return local.fitted(FedAvg(local.train), tuple(3 * width for width in local.case.hidden), rounds=1)


def on_average(local: Trained) -> dict[str, float]:
    """The mean score of the clients' own networks."""
    scores = [local.scored(local.task, Point(theta)) for theta in local.networks.theta]
    return {metric: sum(one[metric] for one in scores) / len(scores) for metric in scores[0]}


def together(local: Trained, by_class: bool) -> dict[str, float]:
    """All networks at once."""
    scores = local.scored(local.task, Ensemble(by_class=by_class).posterior(local.ensemble.server))
    return {**scores, "width": scores["width"] * local.case.clients}


def distilled(local: Trained) -> dict[str, float]:
    """A student of the ensemble, 500 units a layer, trained on everybody's inputs."""
    student = network(local.inputs, (500,) * len(local.case.hidden), local.case.seed + 1000)
    run = distil(local.ensemble, student, local.train, seed=local.case.seed, progress=False)
    return local.scored(run.task, run.posterior)


def poured(local: Trained) -> dict[str, float]:
    """An exchange an epoch; the server's optimiser has the clients' step size."""
    method = Downpour(replace(local.train, epochs=1), Adam(lr=local.train.lr, eps=1e-8))
    return local.fitted(method, local.case.hidden, rounds=local.train.epochs)


def matched(local: Trained, how: BetaBernoulli, data: Dataset | None = None) -> dict[str, float]:
    """Matching by a Beta-Bernoulli process, scored on test data or others."""
    return local.scored(*local.fused(PFNM(how=how)), data)


CONSTRAINED: dict[str, Callable[[Trained], dict[str, float]]] = {
    "PFNM": lambda local: matched(local, BetaBernoulli()),
    "PFNM, γ₀ = 1e-5": lambda local: matched(local, BetaBernoulli(mass=1e-5)),
    "DP-means": lambda local: best_of(local, [DPMeans(penalty) for penalty in PENALTIES]),
    "FedAvg, one shot": averaged_once,
    "local average": on_average,
}
TUNED: dict[str, Callable[[Trained], dict[str, float]]] = {
    "PFNM, tuned": lambda local: best_of(local, [BetaBernoulli(v, mass=m) for v, m in product(VARIANCES, MASSES)]),
}
RESOURCEFUL: dict[str, Callable[[Trained], dict[str, float]]] = {
    "ensemble": lambda local: together(local, by_class=False),
    "ensemble by class": lambda local: together(local, by_class=True),
    "distillation": distilled,
    "downpour SGD": poured,
}


@dataclass(frozen=True)
class Study:
    """One-shot learning over a sweep: `at(value)` is the number of clients and the hidden layers of a point, `main` the
    value that the table is about."""

    name: str
    title: str
    data: str
    train: AMSGrad
    sweep: tuple[int, ...]
    main: int
    at: Callable[[int], tuple[int, tuple[int, ...]]]
    axis: str
    few: tuple[int, ...]
    figures: Mapping[str, Sequence[str]]

    def score(self, case: Case, quick: bool) -> Scores:
        """All methods on one federation."""
        local, shown = (
            trained(case, self.data, self.train, quick),
            {n for names in self.figures.values() for n in names},
        )
        return {name: score(local) for name, score in (CONSTRAINED | TUNED | RESOURCEFUL).items() if name in shown}

    def case(self, split: str, value: int, seed: int, quick: bool = False) -> Case:
        """A point of the sweep; networks are narrow in a quick one."""
        clients, hidden = self.at(value)
        return Case(split, clients, (NARROW,) * len(hidden) if quick else hidden, seed)

    def run(self, options: Options) -> Comparison:
        """The whole sweep, over all seeds; scores that an earlier run has written are read."""
        start = time.perf_counter()
        found: dict[tuple[str, int, int], Scores] = {}
        splits, sweep = (SPLITS[:1], self.few) if options.quick else (SPLITS, self.sweep)
        for seed, split, value in product(range(options.seeds), splits, sweep):
            if options.announce is not None:
                options.announce(f"{split}, {value} {self.axis}", seed)
            case = self.case(split, value, seed, options.quick)
            found[split, value, seed] = kept(options, case, partial(self.score, case, options.quick))
        rows = []
        for split in splits:
            suffix = "" if split == SPLITS[0] else f", {split}"
            table = [found[split, self.main, seed] for seed in range(options.seeds)]
            rows += in_rows(table, suffix, METRICS if split == SPLITS[0] else ("accuracy", "width"))
        figures = [self.figure(title, found, splits, sweep, options.seeds) for title in self.figures]
        where = f"The table is for {self.main} {self.axis}"
        split = "" if options.quick else f", {SPLITS[0]} unless it says {SPLITS[1]}"
        return finished(
            self.name,
            self.title,
            f"{TEXT} {where}{split}.",
            options,
            rows,
            [f for f in figures if len(sweep) > 1],
            start,
        )

    def figure(
        self,
        title: str,
        found: dict[tuple[str, int, int], Scores],
        splits: Sequence[str],
        sweep: Sequence[int],
        seeds: int,
    ) -> Panels:
        """Accuracy and width over the sweep, split by split."""

        def mean(name: str, metric: str, split: str, value: int) -> float:
            scores = [found[split, value, seed].get(name, {}).get(metric, math.nan) for seed in range(seeds)]
            return sum(scores) / len(scores)

        panels = []
        for metric, split in product(("accuracy", "width"), splits):
            curves = [
                Curve(name, [float(v) for v in sweep], [mean(name, metric, split, v) for v in sweep])
                for name in self.figures[title]
            ]
            panels.append(Panel(f"{metric}, {split}", curves, x_label=self.axis))
        return Panels(title, f"Means over {seeds} seeds." if seeds > 1 else "One seed.", panels)

    def recipe(self, seeds: int) -> Recipe:
        """Known to the command by its name."""
        return Recipe(self.name, self.title, self.run, seeds=seeds)


def kept(options: Options, case: Case, work: Callable[[], Scores]) -> Scores:
    """Scores from a file of an earlier run that is resumed, or from work that is then written down."""
    path = Path(options.out) / "cases" / f"{case.slug}.json"
    if options.resume and path.exists():
        found: Scores = json.loads(path.read_text())
        return found
    scores = work()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(scores, ensure_ascii=False))
    return scores


def in_rows(tables: Sequence[Scores], suffix: str = "", metrics: Sequence[str] = METRICS) -> list[Row]:
    """One table a seed, as rows."""
    rows = []
    for name in tables[0]:
        for metric in metrics:
            values = [table[name][metric] for table in tables]
            rows.append(Row(name, f"{metric}{suffix}", *spread(values), len(values)))
    return rows


MNIST_STUDY = Study(
    "pfnm-mnist",
    "One-shot learning on MNIST",
    "mnist",
    MNIST,
    sweep=(2, 5, 10, 15, 20, 25, 30),
    main=10,
    at=lambda clients: (clients, (100,)),
    axis="clients",
    few=(10,),
    figures={"Within the constraints": list(CONSTRAINED), "With more resources": ["PFNM", *RESOURCEFUL]},
)
CIFAR10_STUDY = replace(
    MNIST_STUDY, name="pfnm-cifar10", title="One-shot learning on CIFAR-10", data="cifar10", train=CIFAR10
)
DEEP_STUDY = Study(
    "pfnm-deep",
    "One-shot learning with up to six hidden layers",
    "mnist",
    MNIST,
    sweep=(1, 2, 3, 4, 5, 6),
    main=2,
    at=lambda layers: (10, (50,) * layers),
    axis="hidden layers",
    few=(2,),
    figures={"By depth": ["PFNM", *TUNED, *RESOURCEFUL]},
)
RECIPES = (MNIST_STUDY.recipe(5), CIFAR10_STUDY.recipe(3), DEEP_STUDY.recipe(3))
