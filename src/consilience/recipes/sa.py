"""SA-FL's benchmarks: tapering steps against constant ones, on three splits of four data sets."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from consilience.algorithms import SAFL, FedAvg, FedProx
from consilience.algorithms.switch import Method
from consilience.data import Dataset, Federation, load, partition
from consilience.engines.simulator import Simulator
from consilience.figures.panels import Curve, Panel, Panels
from consilience.models import lenet5, resnet9
from consilience.optim import SGD, Tapered
from consilience.recipes.base import Options, Recipe, about, finished, seeded
from consilience.runs import Run, Storage
from consilience.studies import Setting, compare
from consilience.studies.comparison import Comparison, Row
from consilience.tasks.supervised import Classification

CLIENTS, TAIL = 10, 20  # TAIL: the last rounds, over which the smoothness of a curve is measured
TRAIN = SGD(lr=0.1, epochs=5, batch_size=16)
SPLITS = ("iid", "dir", "scdir")
SHOWN = ("accuracy", "nll", "accuracy wobble", "loss wobble")
TEXT = (
    "Ten clients, five local epochs a round, batch 16, SGD without momentum. “SA per epoch” has the step 0.1/n at the "
    "n-th local epoch, “SA per round” 0.1/n in round n; FedAvg and FedProx (μ = 0.25) have 0.1 throughout. iid: a "
    "random partition; dir: classes by Dirichlet 0.5; scdir: classes in five disjoint super-clusters, Dirichlet 0.5 "
    "inside (the paper gives neither number). “accuracy wobble” and “loss wobble” are the standard deviation of the "
    f"change from one round to the next, over the last {TAIL} rounds."
)


def methods() -> dict[str, Method]:
    """The paper's two schedules, and constant steps."""
    return {
        "FedAvg": FedAvg(TRAIN),
        "FedProx": FedProx(TRAIN, mu=0.25),
        "SA per epoch": SAFL(replace(TRAIN, schedule=Tapered(unit="epochs"))),
        "SA per round": SAFL(replace(TRAIN, schedule=Tapered(unit="rounds"))),
        "SA per round, averaged": SAFL(replace(TRAIN, schedule=Tapered(unit="rounds")), average=True),
    }


def split_by(data: Dataset, split: str, clients: int, seed: int) -> Federation:
    """One of the three partitions."""
    if split == "iid":
        return partition.iid(data, clients, seed=seed)
    if split == "dir":
        return partition.dirichlet(data, clients, alpha=0.5, seed=seed, minimum=16)
    return partition.sc_dir(data, clients, clusters=5, alpha=0.5, seed=seed)


@dataclass(frozen=True)
class Benchmark:
    """One data set with its network."""

    name: str
    data: str
    model: Callable[..., Any]
    rounds: int = 100
    every: int = 1  # the step between used training examples

    def setting(self, split: str, seed: int, quick: bool) -> Setting:
        data = load(self.data)
        train, test = data.train[:: self.every], data.test
        if quick:
            train, test = (about(part, 100) for part in (train, test))
        shape, classes = train.x.shape[1:], len(data.train.classes) or int(data.train.y.max()) + 1
        options = {"width": 2} if quick and self.model is resnet9 else {}
        module = seeded(seed, lambda: self.model(shape, classes, **options))
        return Setting(Classification(module), split_by(train, split, CLIENTS, seed), test)

    def run(self, options: Options) -> Comparison:
        """Compare all methods on each split, and put the results in one table."""
        start = time.perf_counter()
        rows: list[Row] = []
        figures: list[Panels] = []
        for split in SPLITS[-1:] if options.quick else SPLITS:
            found = self.on(split, options)
            suffix = "" if options.quick else f", {split}"
            rows += [replace(row, metric=f"{row.metric}{suffix}") for row in found.rows if row.metric in SHOWN]
            panels = [curves(found, metric) for metric in ("accuracy", "nll")]
            figures.append(Panels(f"Round by round, {split}", "On test data, means over seeds.", panels))
        return finished(self.name, f"Tapering steps on {self.data}", TEXT, options, rows, figures, start)

    def on(self, split: str, options: Options) -> Comparison:
        """Compare all methods on one split."""
        return compare(
            methods(), lambda seed: self.setting(split, seed, options.quick), seeds=options.seeds,
            out=Storage(Path(options.out) / split, checkpoint_every=20), title=f"{self.data}, {split}",
            resume=options.resume, on_run=lambda method, seed: options.tell(f"{split}, {method}", seed),
            measure=lambda run, _: wobble(run), rounds=2 if options.quick else self.rounds, evaluate_every=1,
            engine=Simulator(chunk=CLIENTS, workers=1, threads=1) if options.quick else Simulator(), progress=False,
        )  # fmt: skip

    def recipe(self, seeds: int) -> Recipe:
        return Recipe(
            self.name, f"Tapering steps on {self.data}: iid, Dirichlet, super-clusters", self.run, seeds=seeds
        )


def wobble(run: Run) -> dict[str, float]:
    """The standard deviation of the change of scores from round to round, over the last rounds."""
    scores = [line["eval"] for line in run.history if "eval" in line][-TAIL - 1 :]
    names = {"accuracy": "accuracy wobble", "nll": "loss wobble"} if len(scores) > 1 else {}
    return {
        label: statistics.pstdev(after[metric] - before[metric] for before, after in pairwise(scores))
        for metric, label in names.items()
    }


def curves(found: Comparison, metric: str) -> Panel:
    """A metric by round, the mean over seeds for each method."""
    drawn = []
    for method, runs in found.stored().items():
        (x, *_), values = zip(*(run.curve(metric, "point") for run in runs), strict=True)
        means = [statistics.fmean(at) for at in zip(*values, strict=True)]
        drawn.append(Curve(method, [float(number) for number in x], means))
    return Panel("test loss" if metric == "nll" else metric, drawn, x_label="round")


FMNIST = Benchmark("sa-fmnist", "fashion-mnist", lenet5)
FMNIST_TENTH = Benchmark("sa-fmnist-tenth", "fashion-mnist", lenet5, rounds=30, every=10)  # for two cores
CIFAR10 = Benchmark("sa-cifar10", "cifar10", resnet9)
CIFAR100 = Benchmark("sa-cifar100", "cifar100", resnet9)
STL10 = Benchmark("sa-stl10", "stl10", resnet9)
RECIPES = tuple(benchmark.recipe(1) for benchmark in (FMNIST, FMNIST_TENTH, CIFAR10, CIFAR100, STL10))
