"""BatchNorm at clients whose labels differ: GroupNorm, estimated and averaged statistics, and FedBN on CIFAR-10."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from consilience.algorithms import Algorithm, FedAvg, FedBN
from consilience.core.errors import CheckpointError
from consilience.core.files import write_atomically
from consilience.core.seals import seal_json
from consilience.data import Compose, Crop, Data, Dataset, Federation, Flip, load, partition
from consilience.engines.simulator import Simulator
from consilience.figures.panels import Curve, Panel, Panels
from consilience.models import replace_batchnorm, resnet9
from consilience.optim import SGD, Chain
from consilience.recipes.base import Options, Recipe, about, finished, rows_of, seeded
from consilience.runs import fit
from consilience.runs.reading import read_json
from consilience.runs.run import Run
from consilience.studies.comparison import Comparison
from consilience.tasks import Classification

NAME, TITLE = "batchnorm", "CIFAR-10 with BatchNorm at ten clients"
METRICS = {"accuracy": "all test images", "accuracy at clients": "clients' own labels"}
AUGMENT = Compose((Crop(32, padding=4), Flip()))
Line = dict[str, float]


@dataclass(frozen=True)
class Variant:
    """A network and a method: `task(seed)` has the same convolutions in all variants."""

    method: Callable[[Chain], Algorithm]
    groups: bool = False
    averaged: bool = False


VARIANTS = {
    "GroupNorm": Variant(FedAvg, groups=True),
    "BatchNorm, estimated": Variant(FedAvg),
    "BatchNorm, averaged": Variant(FedAvg, averaged=True),
    "FedBN": Variant(FedBN),
}


def like(federation: Federation, test: Dataset) -> Federation:
    """Test data dealt to the clients of a federation, so that each has its own distribution of labels: a client's share
    of the test images of a label is its share of the training images."""
    counts, labels = federation.label_counts(), test.labels
    assert counts is not None
    assert labels is not None
    owner = torch.empty(len(test), dtype=torch.int64)
    ends = counts.double().cumsum(0) / counts.sum(0).clamp_min(1)  # [K, classes]
    for label in range(counts.shape[1]):
        mine = (labels.cpu() == label).nonzero().squeeze(1)
        places = (torch.arange(len(mine), dtype=torch.float64) + 0.5) / max(len(mine), 1)
        owner[mine] = torch.searchsorted(ends[:, label].contiguous(), places).clamp_max(len(federation) - 1)
    return Federation.from_owner(test, owner, clients=len(federation), names=federation.names)


@dataclass(frozen=True)
class Study:
    """The size of the experiment. `last` is the number of evaluations at the end whose mean is in the table."""

    clients: int = 10
    alpha: float = 0.5
    width: int = 32
    rounds: int = 25
    train: SGD = SGD(lr=0.02, epochs=1, batch_size=64, momentum=0.9, weight_decay=1e-5)
    every: int = 5
    last: int = 2
    variants: tuple[str, ...] = tuple(VARIANTS)
    engine: Simulator = field(
        default_factory=lambda: Simulator(precision="bf16" if torch.cuda.is_available() else "float32")
    )
    examples: int | None = None
    """About as many images, in training and in testing; None for all."""

    @cached_property
    def data(self) -> Data:
        whole = load("cifar10")
        if self.examples is None:
            return whole
        return Data(*(about(part, self.examples) for part in (whole.train, whole.test)))

    @property
    def settings(self) -> str:
        """All that scores depend on, beside the variant and the seed."""
        return repr(replace(self, engine=Simulator(precision=self.engine.precision), variants=()))

    @property
    def text(self) -> str:
        train = self.train
        return (
            f"{self.clients} clients of equal size, each with a mix of labels from Dirichlet {self.alpha:g}; a "
            f"ResNet-9 of width {self.width}; "
            f"{self.rounds} rounds of {train.epochs} epochs of SGD with a rate of {train.lr:g}, a momentum of "
            f"{train.momentum:g} and batches of {train.batch_size}, the same for all. “estimated” statistics are those "
            "of all training images for the global weights; “averaged” ones are running averages, which the server "
            "averages with the weights; FedBN keeps scales, shifts and running averages at the clients. “accuracy” is "
            "on all test images, which are dealt to FedBN's clients in turn. For “accuracy at clients” every client "
            "has test images with its own distribution of labels, and the scores are averaged over clients. Figures "
            f"are means of the last {self.last} evaluations."
        )

    def task(self, variant: Variant, seed: int) -> Classification:
        module = seeded(seed, lambda: resnet9((3, 32, 32), 10, width=self.width, norm="batch"))
        if variant.groups:
            module = replace_batchnorm(module)
        return Classification(module, augment=AUGMENT, batch_norm="averaged" if variant.averaged else "estimated")

    def curve(self, name: str, seed: int) -> list[Line]:
        """The scores of one run, for each round that is evaluated."""
        variant, data = VARIANTS[name], self.data
        federation = partition.mixtures(data.train, self.clients, alpha=self.alpha, seed=seed)
        shares, lines = like(federation, data.test), list[Line]()

        def scored(run: Run, line: dict[str, Any]) -> None:
            if "eval" not in line:
                return
            own = [client["metrics"]["accuracy"] for client in run.evaluate(shares.to(run.task.device)).clients]
            scores = (line["eval"]["accuracy"], sum(own) / len(own))
            lines.append({"round": line["round"], **dict(zip(METRICS, scores, strict=True)), "loss": line["loss"]})

        fit(
            variant.method(self.train), self.task(variant, seed), federation, rounds=self.rounds, test=data.test,
            seed=seed, evaluate_every=self.every, callbacks=[scored], engine=self.engine, progress=False,
        )  # fmt: skip
        return lines

    def run(self, options: Options) -> Comparison:
        """All variants and seeds. A run that has ended is in the folder and is not repeated."""
        start, found = time.perf_counter(), dict[tuple[str, int], list[Line]]()
        _ = self.data  # fails before anything is written
        for seed in range(options.seeds):
            for name in self.variants:
                file = options.out / "curves" / f"{name.replace(', ', '-')}-{seed}.json"
                if not file.exists():
                    options.tell(name, seed)
                    content = {"study": self.settings, "lines": self.curve(name, seed)}
                    file.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(file, seal_json(content, indent=1))
                stored = read_json(file)
                if stored["study"] != self.settings:
                    raise CheckpointError(f"{file} is a run of other settings: {stored['study']}")
                found[name, seed] = stored["lines"]
                write_curves(options.out / "curves.csv", found)
        scores = {
            (name, metric): [
                sum(line[metric] for line in found[name, seed][-self.last :]) / len(found[name, seed][-self.last :])
                for seed in range(options.seeds)
            ]
            for name in self.variants
            for metric in METRICS
        }
        return finished(NAME, TITLE, self.text, options, rows_of(scores), [drawn(found)], start)

    def quick(self) -> Study:
        """The small size."""
        return replace(
            self, clients=3, width=2, rounds=2, every=1, last=1, examples=120, train=replace(self.train, epochs=1),
            engine=Simulator(device="cpu", chunk=3, workers=1, threads=1),
        )  # fmt: skip


def write_curves(path: Path, found: dict[tuple[str, int], list[Line]]) -> None:
    """Write all curves as one table."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["variant", "seed", "round", *METRICS, "loss"])
        for (name, seed), lines in found.items():
            table.writerows([name, seed, *line.values()] for line in lines)


def drawn(found: dict[tuple[str, int], list[Line]]) -> Panels:
    """Accuracy over rounds, averaged over seeds."""
    names = list(dict.fromkeys(name for name, _ in found))
    panels = []
    for metric, title in METRICS.items():
        curves = []
        for name in names:
            seeds = [lines for (other, _), lines in found.items() if other == name]
            rounds = [line["round"] for line in seeds[0]]
            means = [sum(line[metric] for line in lines) / len(lines) for lines in zip(*seeds, strict=True)]
            curves.append(Curve(name, rounds, means))
        panels.append(Panel(title, curves, x_label="round", y_label="accuracy"))
    return Panels("Accuracy over rounds", "Means over seeds.", panels)


def run(options: Options) -> Comparison:
    """Compare all variants."""
    return (Study().quick() if options.quick else Study()).run(options)


RECIPE = Recipe(NAME, TITLE, run)
