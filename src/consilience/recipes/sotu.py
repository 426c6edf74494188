"""State of the Union addresses: the next character at 43 presidents, and adapters for the later ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from consilience.algorithms import Algorithm, FedAvg, FedEP, FedEx, LocalOnly, Pooled, Switch, algorithm
from consilience.algorithms.switch import Method
from consilience.core import Point
from consilience.data import Dataset, Federation, load, partition
from consilience.engines.simulator import Simulator
from consilience.evaluation.scores import evaluate
from consilience.figures.panels import Curve, Panel, Panels
from consilience.inference import Identity
from consilience.models import add_lora, transformer
from consilience.optim import Adam
from consilience.recipes.base import Options, Recipe, compared, seeded
from consilience.runs.directory import Storage
from consilience.runs.fit import fit
from consilience.runs.run import Run
from consilience.studies import Comparison, Setting
from consilience.tasks.supervised import LanguageModel
from consilience.tasks.task import Task

BITS = "bits_per_token"
SPLIT = 1933  # no president spoke before and after
TEXT = (
    "A small transformer predicts the next character of the State of the Union addresses, 1790–2021. Every president "
    "is a client, and the last tenth of his text is the test. All methods have the same local optimiser, Adam, with "
    "the same number of steps. A token is a character; “worst” is the president with the most bits per character. "
)
PRESIDENTS = (
    "FedEP(I) continues the first half of FedAvg's rounds. LocalOnly tests every president's own model on his own text."
)
ADAPTERS = (
    "The network is trained on the pooled addresses before 1933 and then frozen. The presidents after 1933 are the "
    "federation that learns adapters W₀ + s B A of the attention. FedAvg averages A and B. FedEx corrects W₀ by the "
    "residual of that. In the FFA methods A is frozen at its random start, so that W is linear in B. “before” is the "
    "score of the network without adapters."
)


class FrozenA(Algorithm):
    """A method on adapters whose A stays as it was drawn (FFA-LoRA)."""

    def adapt(self, task: Task, seed: int) -> Task:
        module = copy.deepcopy(task.module)
        for name, p in module.named_parameters():
            if name.endswith("lora_A"):
                p.requires_grad_(False)
        return task.with_module(module)


@algorithm
class FFAAvg(FrozenA, FedAvg):
    """FedAvg of B."""


@algorithm
class FFAEP(FrozenA, FedEP):
    """FedEP over B."""


@dataclass(frozen=True)
class Study:
    """The sizes of both parts. `windows` limits the windows of a president in training and in testing; None takes all.
    `scale` is the precision that a window adds to FedEP's posterior; `pooled` trains the network before adapters."""

    length: int = 128
    width: int = 192
    depth: int = 4
    heads: int = 6
    rank: int = 8
    windows: int | None = None
    train: Adam = field(default_factory=lambda: Adam(lr=1e-3, batch_size=32, longest=20))
    pooled: Adam = field(default_factory=lambda: Adam(lr=1e-3, batch_size=256, longest=50))
    scale: float = 0.5
    rounds: int = 40
    backbone: int = 30
    adapted: int = 20
    engine: Simulator = field(
        # Not compiled: presidents have very different numbers of windows, so cohorts have many sizes.
        default_factory=lambda: Simulator(precision="bf16" if torch.cuda.is_available() else "float32", compile=False)
    )

    def data(self) -> tuple[Dataset, Dataset]:
        """Windows of training and of test text."""
        found = load("sotu", length=self.length)
        return self.few(found.train), self.few(found.test)

    def few(self, data: Dataset) -> Dataset:
        """At most `windows` of every president, evenly spaced."""
        if self.windows is None:
            return data
        whole = partition.by_group(data, "president", minimum=1)
        own = (whole.indices(k) for k in range(len(whole)))
        return data[torch.cat([mine[:: -(-len(mine) // self.windows)] for mine in own])]

    def task(self, data: Dataset, seed: int) -> Task:
        """A language model with the initial weights of a seed."""
        characters = len(data.classes)
        shape = {"width": self.width, "depth": self.depth, "heads": self.heads}
        return LanguageModel(seeded(seed, lambda: transformer(data.x.shape[1:], characters, **shape)))

    def presidents(self, seed: int) -> Setting:
        """All presidents."""
        train, test = self.data()
        return Setting(self.task(train, seed), clients(train), clients(test))

    def adapters(self, seed: int, out: Path) -> Setting:
        """The presidents after 1933, and a network with adapters that was trained on the others' pooled text."""
        train, test = self.data()
        early, late = (clients(train[(train.groups["year"] < SPLIT) == before]) for before in (True, False))
        run = fit(
            Pooled(self.pooled), self.task(train, seed), early, rounds=self.backbone, seed=seed, progress=False,
            engine=self.engine, out=Storage(out, checkpoint_every=10), resume=(out / "run.json").exists(),
        )  # fmt: skip
        module = run.model.cpu()
        adapted = seeded(seed, lambda: add_lora(module, rank=self.rank, alpha=2.0 * self.rank))
        return Setting(LanguageModel(adapted), late, clients(test[test.groups["year"] >= SPLIT]))

    def by_president(self) -> dict[str, Method]:
        """FedAvg, FedEP after a warm start, and every president alone."""
        first = FedAvg(self.train)
        then = FedEP(Identity(self.train, self.scale))
        return {"FedAvg": first, "FedEP(I)": Switch(first, then, self.rounds // 2), "LocalOnly": LocalOnly(self.train)}

    def with_adapters(self) -> dict[str, Method]:
        """Methods on A and B, and on B alone."""
        return {
            "FedAvg": FedAvg(self.train),
            "FedEx": FedEx(self.train),
            "FFA, FedAvg": FFAAvg(self.train),
            "FFA, FedEP(I)": FFAEP(Identity(self.train, self.scale)),
        }


QUICK = Study(
    length=16, width=16, depth=1, heads=2, rank=2, windows=12, train=Adam(lr=0.01, batch_size=4, longest=3),
    pooled=Adam(lr=0.01, batch_size=16, longest=10), rounds=4, backbone=2, adapted=2,
    engine=Simulator(device="cpu", chunk=8, workers=1, threads=1),
)  # fmt: skip
FULL = Study()


def clients(data: Dataset) -> Federation:
    """A client for each president."""
    return partition.by_group(data, "president", minimum=1)


def worst(run: Run, at: Setting) -> dict[str, float]:
    """The most bits per character at any president."""
    found = run.evaluation
    assert found is not None
    return {f"{BITS}, worst": max(client["metrics"][BITS] for client in found.clients)}


def worst_and_before(run: Run, at: Setting) -> dict[str, float]:
    """Also the bits of the network before it was adapted."""
    task = at.task.prepare(run.task.device, run.task.dtype, bf16=run.task.execution.bf16)
    before = evaluate(task, Point(task.initial()), at.test)
    return {**worst(run, at), f"{BITS}, before": before.point[BITS]}


def figure(result: Comparison, at: Setting) -> Panels:
    """Bits per character by president, in the order of their first years."""
    test = at.test
    assert isinstance(test, Federation)
    years = {test.name(k): float(test.data.groups["year"][test.indices(k)].min()) for k in range(len(test))}
    found: dict[str, list[tuple[float, float]]] = {}
    for entry in result.per_client:
        if entry["metric"] == BITS:
            found.setdefault(entry["method"], []).append((years[entry["client"]], entry["mean"]))
    curves = [Curve(name, *map(list, zip(*sorted(points), strict=True))) for name, points in found.items()]
    panel = Panel("Bits per character", curves, x_label="year of the test text")
    return Panels("By president", "Bits per character of each president's test text.", [panel])


def run_presidents(options: Options) -> Comparison:
    """Part one: a model for all presidents."""
    study = QUICK if options.quick else FULL
    return _finished(
        "sotu", "The next character at 43 presidents", TEXT + PRESIDENTS, options, study, study.by_president(),
        study.presidents, rounds=study.rounds, measure=worst,
    )  # fmt: skip


def run_adapters(options: Options) -> Comparison:
    """Part two: adapters for later presidents."""
    study = QUICK if options.quick else FULL
    return _finished(
        "sotu-lora", "Adapters for the presidents after 1933", TEXT + ADAPTERS, options, study, study.with_adapters(),
        lambda seed: study.adapters(seed, options.out / "backbone" / f"seed-{seed}"), rounds=study.adapted,
        measure=worst_and_before,
    )  # fmt: skip


def _finished(
    name: str,
    title: str,
    text: str,
    options: Options,
    study: Study,
    methods: dict[str, Method],
    setting: Callable[[int], Setting],
    **others: Any,
) -> Comparison:
    """A comparison with a figure of all presidents."""
    seen: list[Setting] = []

    def remembered(seed: int) -> Setting:
        seen.append(setting(seed))
        return seen[-1]

    result = compared(
        name, title, text, options, methods, remembered, engine=study.engine,
        evaluate_every=max(2, others["rounds"] // 4), **others,
    )  # fmt: skip
    result.figures = [figure(result, seen[-1])]
    result.save(options.out)
    return result


RECIPES = (
    Recipe("sotu", "The next character of 43 presidents' addresses", run_presidents, seeds=1),
    Recipe("sotu-lora", "LoRA adapters for later presidents: averaged, exact and Bayesian", run_adapters, seeds=1),
)
