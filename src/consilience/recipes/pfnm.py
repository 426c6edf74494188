"""PFNM's experiments: clients train their own networks, communicate once, and the server fuses them."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from consilience.algorithms import PFNM
from consilience.figures.panels import Curve, Panel, Panels
from consilience.matching import BetaBernoulli, DPMeans
from consilience.optim import AMSGrad
from consilience.recipes.base import Options, Recipe, finished
from consilience.recipes.pfnm_local import (
    METRICS,
    Case,
    Scores,
    Trained,
    averaged_once,
    best_of,
    distilled,
    downpour,
    ensembled,
    in_rows,
    kept,
    local_average,
    matched,
    trained,
)
from consilience.recipes.pfnm_variants import EvenShares
from consilience.studies.comparison import Comparison

MNIST = AMSGrad(lr=0.01, epochs=10, batch_size=32, weight_decay=1e-6)
CIFAR10 = AMSGrad(lr=0.001, epochs=10, batch_size=32, weight_decay=1e-5)
SPLITS = ("heterogeneous", "homogeneous")
PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0)  # of DP-means
VARIANCES = (0.1, 0.5, 1.0)  # the authors' grid of σ²
NARROW = 20  # hidden units in a quick run
TEXT = (
    "Clients train networks of their own and communicate with the server once. “heterogeneous”: every class is "
    "partitioned by Dirichlet 0.5, sizes balanced, as in the authors' code. Pixels are in [0, 1]. PFNM has σ² = 1, "
    "σ₀² = 10, γ₀ = 1, and matches layers from the bottom up, or “top-down” as in the paper. “σ² tuned” is the σ² of "
    "0.1, 0.5 and 1 that is best on training data, as in the paper, and so is the penalty of DP-means, one of five. "
    "FedAvg starts all clients at the same weights and has three times their width. “local average” is the mean score "
    "of the clients' own networks. The last four methods have more than one network to predict with (ensembles), all "
    "inputs in one place (distillation, 500 units a layer), or ten rounds (downpour SGD). “width” counts the hidden "
    "units that a prediction needs."
)

CONSTRAINED: dict[str, Callable[[Trained], dict[str, float]]] = {
    "PFNM": lambda local: matched(local, PFNM()),
    "PFNM, γ₀ = 1e-5": lambda local: matched(local, PFNM(how=BetaBernoulli(mass=1e-5))),
    "DP-means": lambda local: best_of(local, [PFNM(how=DPMeans(penalty)) for penalty in PENALTIES]),
    "FedAvg, one shot": averaged_once,
    "local average": local_average,
}
DEEP: dict[str, Callable[[Trained], dict[str, float]]] = {
    "PFNM, σ² tuned": lambda local: best_of(local, [PFNM(how=BetaBernoulli(v)) for v in VARIANCES]),
    "PFNM, shares × J": lambda local: matched(local, PFNM(how=EvenShares())),
    "PFNM, top-down": lambda local: matched(local, PFNM(top_down=True)),
    "PFNM, top-down, shares × J": lambda local: matched(local, PFNM(how=EvenShares(), top_down=True)),
    "PFNM, top-down, σ² tuned": lambda local: best_of(
        local, [PFNM(how=BetaBernoulli(v), top_down=True) for v in VARIANCES]
    ),
}
RESOURCEFUL: dict[str, Callable[[Trained], dict[str, float]]] = {
    "ensemble": lambda local: ensembled(local, by_class=False),
    "ensemble by class": lambda local: ensembled(local, by_class=True),
    "distillation": distilled,
    "downpour SGD": downpour,
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
        local = trained(case, self.data, self.train, quick)
        shown = {name for names in self.figures.values() for name in names}
        return {name: score(local) for name, score in (CONSTRAINED | DEEP | RESOURCEFUL).items() if name in shown}

    def case(self, split: str, value: int, seed: int, quick: bool = False) -> Case:
        """A point of the sweep, with narrow networks in a quick run."""
        clients, hidden = self.at(value)
        return Case(split, clients, (NARROW,) * len(hidden) if quick else hidden, seed)

    def run(self, options: Options) -> Comparison:
        """The whole sweep over all seeds. A resumed run reads the scores of an earlier one."""
        start = time.perf_counter()
        found: dict[tuple[str, int, int], Scores] = {}
        splits, sweep = (SPLITS[:1], self.few) if options.quick else (SPLITS, self.sweep)
        for seed, split, value in product(range(options.seeds), splits, sweep):
            options.tell(f"{split}, {value} {self.axis}", seed)
            case = self.case(split, value, seed, options.quick)
            found[split, value, seed] = kept(options, case.slug, partial(self.score, case, options.quick))
        rows = []
        for split in splits:
            suffix = "" if split == SPLITS[0] else f", {split}"
            table = [found[split, self.main, seed] for seed in range(options.seeds)]
            rows += in_rows(table, suffix, METRICS if split == SPLITS[0] else ("accuracy", "width"))
        figures = [self.figure(title, found, splits, sweep, options.seeds) for title in self.figures]
        where = f"The table is for {self.main} {self.axis}"
        split = "" if options.quick else f", {SPLITS[0]} unless it says {SPLITS[1]}"
        return finished(
            self.name, self.title, f"{TEXT} {where}{split}.", options, rows, [f for f in figures if len(sweep) > 1],
            start,
        )  # fmt: skip

    def figure(
        self,
        title: str,
        found: dict[tuple[str, int, int], Scores],
        splits: Sequence[str],
        sweep: Sequence[int],
        seeds: int,
    ) -> Panels:
        """Accuracy and width over the sweep, by split."""

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
        return Recipe(self.name, self.title, self.run, seeds=seeds)


MNIST_STUDY = Study(
    "pfnm-mnist", "One-shot learning on MNIST", "mnist", MNIST, sweep=(2, 5, 10, 15, 20, 25, 30), main=10,
    at=lambda clients: (clients, (100,)), axis="clients", few=(10,),
    figures={"Within the constraints": list(CONSTRAINED), "With more resources": ["PFNM", *RESOURCEFUL]},
)  # fmt: skip
CIFAR10_STUDY = replace(
    MNIST_STUDY, name="pfnm-cifar10", title="One-shot learning on CIFAR-10", data="cifar10", train=CIFAR10
)
DEEP_STUDY = Study(
    "pfnm-deep", "One-shot learning with up to six hidden layers", "mnist", MNIST, sweep=(1, 2, 3, 4, 5, 6), main=2,
    at=lambda layers: (10, (50,) * layers), axis="hidden layers", few=(2,),
    figures={"By depth": ["PFNM", *DEEP, *RESOURCEFUL]},
)  # fmt: skip
RECIPES = (MNIST_STUDY.recipe(5), CIFAR10_STUDY.recipe(3), DEEP_STUDY.recipe(3))
