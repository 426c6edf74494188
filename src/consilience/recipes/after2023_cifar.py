"""BayesADMM and FedLap beside FedAvg, FedDyn and FedEP: CIFAR with ResNet-20, ten clients with skewed labels."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from consilience.algorithms import BayesADMM, FedAvg, FedDyn, FedEP, FedLap
from consilience.algorithms.switch import Method, Switch
from consilience.data import load, partition
from consilience.engines import Simulator
from consilience.inference import Identity, Variational
from consilience.metrics import MARGINAL
from consilience.models import resnet20
from consilience.optim import IVON, Adam
from consilience.optim.schedules import Cosine
from consilience.recipes.base import Options, Recipe, about, finished, rows_of, seeded
from consilience.runs import Run, Storage, fit
from consilience.studies import Comparison, Setting
from consilience.tasks.supervised import Classification

NAME, TITLE = "after2023-cifar", "Methods since 2023: CIFAR with ResNet-20 at ten clients"
DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
METRICS = ("accuracy", "nll", "ece")
LAST = 3  # a score is the mean over so many last rounds
SAMPLES = 16  # of a posterior, whose predictions “marginal” averages
CURVE = "curve.jsonl"
TEXT = (
    "ResNet-20 with GroupNorm (2 groups), ten clients, all in each round, every class divided over the clients by "
    "Dirichlet(0.5); images standardised by channel, without augmentation. Every seed is another split and other "
    "initial weights, the same for all methods. Batches of 64; Adam (1e-3), IVON (1e-3) for BayesADMM, and step sizes "
    "that fall to a twentieth along half a cosine over the rounds. Settings are the papers' or the library's, without "
    f"tuning. BayesADMM's posterior is cold, κ = 10. Scores are of all test images, the mean of the last {LAST} "
    f"rounds. “marginal” averages the predictions of {SAMPLES} samples of the posterior."
)
Line = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """Sizes; the defaults are those of BayesADMM's paper. `images` and `tested` limit the examples of the small size.
    Scores are found every `every` rounds and in the last ones."""

    rounds: int = 100
    epochs: int = 25
    batch_size: int = 64
    clients: int = 10
    width: int = 16
    images: int | None = None
    tested: int | None = None
    every: int = 10
    engine: Simulator = field(default_factory=Simulator)

    def setting(self, name: str, seed: int) -> Setting:
        """The clients of a seed, ResNet-20 with its initial weights, and the test images."""
        data = load(name)
        train = about(data.train, self.images or len(data.train))
        test = about(data.test, self.tested or len(data.test))
        shape, classes = train.x.shape[1:], len(data.train.classes)
        module = seeded(seed, lambda: resnet20(shape, classes, width=self.width))
        return Setting(Classification(module), partition.dirichlet(train, self.clients, alpha=0.5, seed=seed), test)

    def methods(self, name: str) -> dict[str, Method]:
        """The methods, with the settings of their papers for this data set."""
        schedule = Cosine(unit="rounds", total=self.rounds, floor=0.05)
        passes: dict[str, Any] = {"epochs": self.epochs, "batch_size": self.batch_size, "schedule": schedule}
        adam, ivon = Adam(lr=1e-3, **passes), IVON(lr=1e-3, beta2=0.99999, h0=0.1, kappa=10.0, **passes)
        return {
            "FedAvg": FedAvg(adam),
            "FedDyn": FedDyn(adam, alpha=0.1),
            "FedLap": FedLap(adam, prior=20.0 if name == "cifar10" else 10.0, damping=0.1),
            "FedEP(I)": Switch(FedAvg(adam), FedEP(Identity(adam, scale=0.05)), at=max(1, self.rounds // 2)),
            "BayesADMM": BayesADMM(Variational(ivon), rho=0.5, damping=0.1, prior=2.0),
        }

    def is_due(self, number: int) -> bool:
        """Whether a round is scored."""
        return number % self.every == 0 or number > self.rounds - LAST

    def learn(self, name: str, method: str, seed: int, here: Path) -> Line:
        """The line of one run, which is resumed if the folder `here` holds a part of it. The scores of its rounds so
        far are in `CURVE` of the folder."""
        at, start = self.setting(name, seed), time.perf_counter()
        here.mkdir(parents=True, exist_ok=True)

        def score(run: Run, line: Mapping[str, Any]) -> None:
            if self.is_due(line["round"]):
                found = run.evaluate(at.test, samples=SAMPLES)
                point = {metric: found.point[metric] for metric in METRICS}
                marginal = found.marginal and {metric: found.marginal[metric] for metric in METRICS}
                text = json.dumps({"round": line["round"], **point, "marginal": marginal})
                with open(here / CURVE, "a") as file:
                    file.write(text + "\n")

        run = fit(
            self.methods(name)[method], at.task, at.federation, rounds=self.rounds, seed=seed, engine=self.engine,
            out=Storage(here / "run", checkpoint_every=max(1, self.rounds // 5)), resume=True, callbacks=[score],
            progress=False,
        )  # fmt: skip
        curve, seconds = read_curve(here), [line["seconds"] for line in run.history]
        return {
            "data": name,
            "method": method,
            "seed": seed,
            "rounds": self.rounds,
            "epochs": self.epochs,
            "clients": len(at.federation),
            "images": at.federation.examples,
            "parameters": at.task.size,
            **final(curve),
            "rejected": sum(len(line["rejected"]) for line in run.history),
            "seconds": round(sum(seconds), 1),
            "round_seconds": round(statistics.median(seconds), 2),
            "wall": round(time.perf_counter() - start, 1),
            "curve": curve,
        }


QUICK = Study(
    rounds=2, epochs=1, batch_size=32, clients=3, width=4, images=200, tested=100,
    engine=Simulator(device="cpu", chunk=3, workers=1, threads=1),
)  # fmt: skip


def read_curve(here: Path) -> list[Line]:
    """The scores of a run's rounds so far; the last ones of a round that was run twice."""
    path = here / CURVE
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    found = {line["round"]: line for line in lines}
    return [found[number] for number in sorted(found)]


def final(curve: list[Line]) -> Line:
    """The mean scores of the last rounds."""

    def mean(lines: list[Line]) -> dict[str, float]:
        return {metric: statistics.fmean(line[metric] for line in lines) for metric in METRICS}

    last = curve[-LAST:]
    marginal = [line["marginal"] for line in last if line["marginal"]]
    return {**mean(last), "marginal": mean(marginal) if len(marginal) == len(last) else None}


def run(options: Options) -> Comparison:
    """All methods on both data sets, one run after another."""
    start, study = time.perf_counter(), QUICK if options.quick else Study()
    scores = dict[tuple[str, str], list[float]]()
    for name, title in DATA.items():
        for method in study.methods(name):
            for seed in range(options.seeds):
                options.tell(f"{title}: {method}", seed)
                line = study.learn(name, method, seed, options.out / "runs" / name / method / f"seed-{seed}")
                for kind, found in (("", line), (MARGINAL, line["marginal"] or {})):
                    for metric in METRICS:
                        if metric in found:
                            scores.setdefault((method, f"{metric}, {title}{kind}"), []).append(found[metric])
    return finished(NAME, TITLE, TEXT, options, rows_of(scores), [], start)


RECIPE = Recipe(NAME, TITLE, run)
