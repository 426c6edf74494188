"""A posterior from four hospitals, against the one that a long NUTS run finds on their pooled data."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from importlib import resources

import torch
from torch import Tensor, nn

from consilience.algorithms import Algorithm, FedAvg, FedEP, FedPA, FedSEP
from consilience.core.gaussian import Gaussian
from consilience.data import Federation, heart_disease, partition
from consilience.engines import Simulator
from consilience.figures.panels import Curve, Panel, Panels
from consilience.inference import Laplace, Newton
from consilience.optim import SGD
from consilience.recipes.base import Options, Recipe, finished, rows_of
from consilience.runs import Run, fit
from consilience.studies.comparison import Comparison
from consilience.tasks.supervised import MultiLabel

TEXT = (
    "Bayesian logistic regression on 920 patients with the prior N(0, 1) for each weight. The reference is the "
    "posterior of the pooled data by 100,000 draws of NUTS. “mean error” is the distance of a method's posterior mean "
    "from NUTS's in posterior standard deviations, “sd error” the relative error of its marginal standard deviations, "
    "both averaged over the 30 weights. With the full Hessian FedEP finds the pooled Laplace approximation; a diagonal "
    "precision keeps the mean and cannot keep the marginal deviations of correlated weights. Methods without a "
    "posterior have no sd error."
)
PATIENTS = 920


@dataclass(frozen=True)
class Reference:
    """The stored posterior: mean and standard deviation of each weight, intercept last."""

    mean: Tensor
    sd: Tensor
    features: list[str]

    @classmethod
    def read(cls, name: str = "heart_posterior") -> Reference:
        """The file that the script of this name in `benchmarks` writes."""
        stored = json.loads(resources.files("consilience.recipes").joinpath(f"{name}.json").read_text())
        mean, sd = (torch.tensor(stored[key], dtype=torch.float64) for key in ("mean", "sd"))
        return cls(mean, sd, stored["features"])

    def errors(self, run: Run) -> dict[str, float]:
        belief = run.posterior
        off = (belief.mean - self.mean).abs() / self.sd
        found = {"mean error": float(off.mean()), "worst mean error": float(off.max())}
        if isinstance(belief, Gaussian):
            ratio = (belief.variance.sqrt() / self.sd - 1).abs()
            found |= {"sd error": float(ratio.mean()), "worst sd error": float(ratio.max())}
        return found


def setting() -> tuple[MultiLabel, Federation]:
    """Logistic regression from weights 0, and a client for each hospital."""
    data = heart_disease()
    module = nn.Linear(data.x.shape[1], 1)
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    data = replace(data, y=data.y.float().unsqueeze(1), classes=("disease",))
    return MultiLabel(module), partition.by_group(data, "hospital")


def methods() -> dict[str, tuple[Algorithm, int]]:
    """Methods and their rounds. A prior of precision 1 is a weight decay of 1/920 for methods that have no prior."""
    decay = SGD(lr=0.05, epochs=2, batch_size=16, weight_decay=1 / PATIENTS)
    laplace = Laplace(SGD(lr=0.05, momentum=0.9, epochs=20, batch_size=64), kappa=1.0, clip=False, batch_size=128)
    return {
        "FedEP(L), full": (FedEP(Newton(), damping=1.0, prior=1.0), 6),
        "FedSEP(L), full": (FedSEP(Newton(), prior=1.0), 60),
        "FedEP(L), exact diagonal": (FedEP(Newton(diagonal=True), prior=1.0), 200),
        "FedEP(L), SGD and diagonal Fisher": (FedEP(laplace, prior=1.0), 200),
        "FedPA": (FedPA(replace(decay, epochs=10), burn_in=5), 100),
        "FedAvg": (FedAvg(decay), 100),
    }


def run(options: Options) -> Comparison:
    """All methods. A seed changes the batches only, so exact inference has no spread."""
    reference, (task, hospitals), start = Reference.read(), setting(), time.perf_counter()
    engine = Simulator(device="cpu", precision="float64", chunk=4, workers=1, threads=1)
    scores: dict[tuple[str, str], list[float]] = {}
    paths: dict[str, list[dict[str, float]]] = {}
    for name, (method, rounds) in methods().items():
        for seed in range(options.seeds):
            options.tell(name, seed)
            path: list[dict[str, float]] = []
            few = min(rounds, 6) if options.quick else rounds
            follow = [lambda done, _, path=path: path.append(reference.errors(done))]
            fit(method, task, hospitals, rounds=few, seed=seed, engine=engine, progress=False, callbacks=follow)
            paths.setdefault(name, path)
            for metric, value in path[-1].items():
                scores.setdefault((name, metric), []).append(value)
    title = "The posterior of four hospitals"
    return finished("fedep-hospitals", title, TEXT, options, rows_of(scores), [figure(paths)], start)


def figure(paths: dict[str, list[dict[str, float]]]) -> Panels:
    """The errors of the first seed, round by round."""
    panels = []
    for metric in ("mean error", "sd error"):
        curves = [
            Curve(name, [float(i + 1) for i in range(len(path))], [errors[metric] for errors in path])
            for name, path in paths.items()
            if metric in path[0]
        ]
        panels.append(Panel(metric, curves, x_label="round", log=True))
    caption = "Distance from the pooled posterior, in posterior standard deviations and as a share of them; first seed."
    return Panels("Round by round", caption, panels)


RECIPE = Recipe("fedep-hospitals", "FedEP's posterior of four hospitals against NUTS on their pooled data", run)
