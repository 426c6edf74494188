"""SA-FL where the minimiser is known: the distance of the mean weights from their ODE, and rates of convergence."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import root
from torch import Tensor, nn

from consilience.algorithms.safl import SAFL
from consilience.data import Batch, Dataset, Federation
from consilience.diagnostics import ode
from consilience.engines import Simulator
from consilience.figures.panels import Curve, Mark, Panel, Panels
from consilience.optim import SGD, Tapered
from consilience.recipes import fedep_hospitals
from consilience.recipes.base import Options, Recipe, finished, rows_of
from consilience.runs.fit import fit
from consilience.studies.comparison import Comparison, Row
from consilience.tasks import Regression, Task

ENGINE = Simulator(device="cpu", chunk=4, workers=1, threads=1, precision="float64")
TAPERING, CONSTANT, THEORY = "tapering steps", "constant step", "theory"
TEXT = (
    "Four clients take local steps, and the server takes the uniform mean w̄ of their weights. From w̄ after round n the "
    "ODE ẇ = h(w) is solved over a window of time; “tracking_error@n” is the largest distance of w̄ from the solution "
    "in it. With steps a_n = C/n (C = 1 for regressions and 2 for hospitals) it must fall; with a constant step, equal "
    "to the tapering step at the first of these rounds, it must not. “final error” is the distance from the "
    "equilibrium of the ODE. Regressions: clients differ in inputs, truth and size, and each use of a target adds new "
    "noise to it; the 128 outputs are repetitions. Hospitals: logistic regression with weight decay on 920 patients. "
    "In the field, a client with more examples counts more, because it takes more steps in a round. “slope” is that of "
    "log error over log n in the last decade of rounds; the error is the root mean square over repetitions of the "
    "regressions. Theory gives −δ/2 for δ < 1 and −min(½, Cλ) for δ = 1, with λ the smallest curvature times the steps "
    "in a round; the paper proves no rate."
)


class Measured(Regression):
    """Each use of a target adds new noise, y + N(0, SIGMA²), which does not cancel over an epoch."""

    def loss_one(self, theta: Tensor, batch: Batch) -> Tensor:
        return super().loss_one(
            theta, replace(batch, y=batch.y + SIGMA * self.likelihood.draw(torch.zeros_like(batch.y), batch.key))
        )


SIZES = (16, 12, 10, 8)
BATCH = 8
REPETITIONS = 128
SIGMA = 4.0


def regressions() -> tuple[Measured, Federation]:
    """Clients with their own inputs and truths in two dimensions. Each output is a repetition with its own weights and
    noise, and the same targets."""
    rng, silos = np.random.default_rng(0), {}
    for client, size in enumerate(SIZES):
        turn, stretch = rng.normal(size=(2, 2)) / 4, np.diag([1.0, 0.8])
        x = rng.normal(size=(size, 2)) @ (stretch + turn)
        y = x @ (np.array([2.0, -1.0]) + rng.normal(size=2))
        targets = torch.from_numpy(y).unsqueeze(1).repeat(1, REPETITIONS)
        silos[f"client {client + 1}"] = Dataset(torch.from_numpy(x), targets, name="regressions")
    module = nn.Linear(2, REPETITIONS, bias=False)
    nn.init.zeros_(module.weight)
    return Measured(module), Federation.from_silos(silos)


def plain(task: Task) -> Task:
    """The task whose gradients are the expected ones."""
    return Regression(task.module) if isinstance(task, Measured) else task


def curvature(federation: Federation, train: SGD) -> tuple[Tensor, Tensor]:
    """A and w* of the regressions' field h(w) = −A (w − w*), by the normal equations of Σ p_i (B_i / B̄) f_i."""
    steps = train.batches(federation.sizes)
    a, b = torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for client, share in enumerate((steps / steps.sum()).tolist()):
        data = federation.client(client)
        a += share * data.x.mT @ data.x / len(data)
        b += share * data.x.mT @ data.y[:, 0] / len(data)
    return a, torch.linalg.solve(a, b)


@dataclass(frozen=True)
class Case:
    """A federation, its clients' optimiser and the minimiser; `first` is the first round of a window."""

    suffix: str
    task: Task
    federation: Federation
    train: SGD
    minimiser: Tensor
    window: float
    first: int

    def trains(self) -> dict[str, SGD]:
        """Tapering steps, and the constant step equal to the tapering one when the first window begins."""
        constant = replace(self.train, lr=self.train.lr / self.first, schedule=None)
        return {TAPERING: self.train, CONSTANT: constant}


def regression_case() -> Case:
    """C = 1, δ = 1."""
    task, federation = regressions()
    train = SGD(lr=1.0, epochs=1, batch_size=BATCH, schedule=Tapered(delta=1.0, unit="epochs"))
    minimiser = curvature(federation, train)[1].repeat(REPETITIONS)
    return Case("", task, federation, train, minimiser, 1.0, 4)


def hospital_case() -> Case:
    """C = 2, δ = 1; the weight decay makes the objective strongly convex."""
    task, federation = fedep_hospitals.setting()
    train = SGD(lr=2.0, epochs=1, batch_size=64, weight_decay=0.1, schedule=Tapered(delta=1.0, unit="epochs"))
    field = ode.mean_field(task, federation, train)

    def derivative(w: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return field(torch.from_numpy(w)).numpy()

    found = root(derivative, np.zeros(task.size), tol=1e-12)
    return Case(", hospitals", task, federation, train, torch.from_numpy(found.x), 3.0, 6)


@dataclass(frozen=True)
class Followed:
    """A run against its ODE: w̄ after each round, the windows, and the distance from the minimiser."""

    points: Tensor
    tracking: ode.Tracking
    errors: Tensor


def follow(case: Case, train: SGD, starts: Sequence[int], rounds: int, seed: int) -> Followed:
    """Run SA-FL and track its ODE."""
    path = ode.Path()
    fit(
        SAFL(train), case.task, case.federation, rounds=rounds, seed=seed, engine=ENGINE, progress=False,
        callbacks=[path],
    )  # fmt: skip
    field = ode.mean_field(plain(case.task), case.federation, train)
    clock = ode.times(train, case.federation, rounds)
    found = ode.track(field, path.points, clock, starts, case.window)
    return Followed(path.points, found, (path.points - case.minimiser).norm(dim=1))


def growing(case: Case, rounds: int) -> list[int]:
    """Five rounds from the first to the last whose window ends before the run, for both kinds of steps."""
    last = rounds
    for train in case.trains().values():
        clock = ode.times(train, case.federation, rounds)
        last = min(last, int((clock + case.window <= clock[-1]).nonzero().max()))
    return [round(start) for start in np.geomspace(case.first, last, 5)]


RATES = {  # (δ, C · λ, theoretical slope); λ is the smallest curvature times the steps in a round
    "slope, δ = 0.8": (0.8, 1.0, -0.4),
    "slope, δ = 1, Cλ = 0.1": (1.0, 0.1, -0.1),
    "slope, δ = 1, Cλ = 0.4": (1.0, 0.4, -0.4),
    "slope, δ = 1, Cλ = 1": (1.0, 1.0, -0.5),
}


def rate(delta: float, pull: float, rounds: int) -> Tensor:
    """Distance from the minimiser after each round, the root mean square over repetitions, [rounds]."""
    task, federation = regressions()
    train = SGD(epochs=1, batch_size=BATCH, schedule=Tapered(delta=delta, unit="rounds"))
    a, minimiser = curvature(federation, train)
    steps = float(ode.times(replace(train, lr=1.0, schedule=None), federation, 1)[-1])
    train = replace(train, lr=pull / (float(torch.linalg.eigvalsh(a)[0]) * steps))
    path = ode.Path()
    fit(SAFL(train), task, federation, rounds=rounds, engine=ENGINE, progress=False, callbacks=[path])
    return (path.points[1:].view(rounds, REPETITIONS, 2) - minimiser).square().sum(-1).mean(-1).sqrt()


def slope(error: Tensor) -> float:
    """The slope of log error over log n in the last decade, by least squares at evenly spaced log n."""
    n = np.unique(np.geomspace(len(error) / 10, len(error), 40).round().astype(int))
    return float(np.polyfit(np.log(n), np.log(error.numpy()[n - 1]), 1)[0])


@dataclass(frozen=True)
class Rounds:
    """The rounds of each part."""

    regressions: int
    hospitals: int
    rates: int


QUICK, FULL = Rounds(300, 150, 150), Rounds(1500, 500, 3000)


def run(options: Options) -> Comparison:
    """Both federations, then the rates."""
    start = time.perf_counter()
    size = QUICK if options.quick else FULL
    scores: dict[tuple[str, str], list[float]] = {}
    first: dict[str, dict[str, Followed]] = {}
    for case, rounds in ((regression_case(), size.regressions), (hospital_case(), size.hospitals)):
        starts = growing(case, rounds)
        for method, train in case.trains().items():
            found = []
            for seed in range(options.seeds):
                options.tell(method + case.suffix, seed)
                found.append(follow(case, train, starts, rounds, seed))
            first.setdefault(case.suffix, {})[method] = found[0]
            errors = torch.tensor([one.tracking.errors for one in found])
            for at, column in zip(starts, errors.T.tolist(), strict=True):
                scores[method, f"tracking_error@{at}{case.suffix}"] = column
            scores[method, f"final error{case.suffix}"] = [float(one.errors[-1]) for one in found]
    rows, curves = rows_of(scores), []
    for metric, (delta, pull, theory) in RATES.items():
        options.tell(metric, 0)
        error = rate(delta, pull, size.rates)
        rows.append(Row(TAPERING, metric, slope(error), None, options.seeds))
        rows.append(Row(THEORY, metric, theory, None, options.seeds))
        curves.append(logarithmic(metric.removeprefix("slope, "), error))
    figures = [tracking_figure(first), error_figure(first, curves), window_figure(first[""])]
    title = "Federated learning as stochastic approximation"
    return finished("sa-ode", title, TEXT, options, rows, figures, start)


def logarithmic(label: str, error: Tensor) -> Curve:
    """Errors after rounds 1, 2, …, thinned out so that they are even on a logarithmic axis."""
    n = np.unique(np.geomspace(1, len(error), 60).round().astype(int))
    return Curve(label, np.log10(n).tolist(), error.numpy()[n - 1].tolist())


def tracking_figure(first: dict[str, dict[str, Followed]]) -> Panels:
    """Tracking errors of the first seed."""
    panels = []
    for suffix, found in first.items():
        curves = [
            Curve(method, np.log10(one.tracking.starts).tolist(), one.tracking.errors) for method, one in found.items()
        ]
        panels.append(Panel("Hospitals" if suffix else "Regressions", curves, x_label="log₁₀ round", log=True))
    caption = "The largest distance of w̄ from the ODE's solution in a window that begins after the round; first seed."
    return Panels("Tracking the ODE", caption, panels)


def error_figure(first: dict[str, dict[str, Followed]], rates: list[Curve]) -> Panels:
    """Distances from the minimiser: of the first seed, and as measured for the rates."""
    panels = []
    for suffix, found in first.items():
        curves = [logarithmic(method, one.errors[1:]) for method, one in found.items()]
        panels.append(Panel("Hospitals" if suffix else "Regressions", curves, x_label="log₁₀ round", log=True))
    panels.append(Panel("Rates", rates, x_label="log₁₀ round", log=True))
    caption = (
        "Distance of w̄ from the equilibrium of the ODE over rounds, both axes logarithmic. Left and centre, the first "
        "seed; right, the root mean square over repetitions of the regressions, whose slopes are in the table."
    )
    return Panels("To the minimiser", caption, panels)


def window_figure(found: dict[str, Followed]) -> Panels:
    """Two windows of the regressions in the plane of one output's two weights."""
    panels = []
    for index, title in ((0, "An early window"), (2, "A later one")):
        curves, marks = [], []
        for method, one in found.items():
            window = one.tracking.windows[index]
            curves.append(Curve(method, *window.path[:, :2].T.tolist()))
            curves.append(Curve("ODE", *window.solution[:, :2].T.tolist()))
            marks.append(Mark(method, *window.path[0, :2].tolist()))
        panels.append(Panel(f"{title}: from round {window.start}", curves, marks, x_label="w₁", y_label="w₂"))
    caption = "w̄ and, dashed, the solution of the ODE from the same point (a dot); one output, first seed."
    return Panels("In the plane of the weights", caption, panels)


RECIPE = Recipe("sa-ode", "SA-FL against its ODE, and its rates of convergence", run)
