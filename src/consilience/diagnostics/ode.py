"""Does the mean of the clients' weights follow its ODE?

Clients step down their gradients, and the server averages: w̄ is a noisy Euler scheme of ẇ = h(w), whose clock after
n rounds stands at T_n, the sum of all steps so far.

path = ode.Path()
run = consilience.fit(SAFL(train), task, federation, rounds=500, callbacks=[path])
found = path.track(window=1.0)
found.plot()

What the theorem says: with steps that sum to infinity and whose squares do not, the largest distance of w̄ from the
solution that starts at w̄(T_n), over any window [T_n, T_n + T] of fixed length, goes to 0 as n grows. What it does not
say: how fast; that w̄ follows one solution for ever (a new one starts in every window); or that it ends at a good place,
as w̄ only goes where the ODE does. With constant steps the distance stays as large as noise and drift make it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from consilience.algorithms.safl import SAFL
from consilience.core.errors import ConfigError, ConsilienceError, DataError, TaskError
from consilience.core.records import Point
from consilience.data.cohort import Cohort
from consilience.data.federation import Federation
from consilience.figures.panels import Curve, Panel, Panels
from consilience.optim import SGD, Chain
from consilience.runs.run import Run
from consilience.tasks.task import Task

if TYPE_CHECKING:
    from consilience.report.figure import Figure

Field = Callable[[Tensor], Tensor]

MAX_GRADIENTS = 2e7  # numbers in all clients' gradients: 160 MB
MAX_WORK = 2e9  # examples × parameters: about a second for one value of the field, of which a window takes a hundred
TOGETHER = 16384  # examples of all clients in memory at once
STARTS = 5
ENOUGH = 2  # rounds in a window
RTOL, ATOL = 1e-8, 1e-10


def mean_field(task: Task, federation: Federation, train: Chain, weights: Tensor | None = None) -> Field:
    """h(w) = −Σ p_i s_i (∇f_i(w) + weight_decay · w), s_i = c_i B_i / Σ p_j c_j B_j: where clients go on average.

    f_i is client i's mean loss over all its examples, B_i how many steps it takes in an epoch (more, if it has more
    examples), c_i its own factor on the step size if `train.schedule` has one. For clients of equal size this is
    −Σ p_i ∇f_i. p (`weights`) are the server's, uniform when None; n_k / n are those of FedAvg.
    Values are exact, in double precision, so this is for small models.
    """
    _check_field(task, federation)
    share = _weights(federation, weights) * _pull(train, federation)
    device = federation.order.device
    exact = task.prepare(device, torch.float64)
    ids = federation.sizes.argsort(descending=True, stable=True)
    cohort = Cohort(federation, ids, round=1, round_size=len(ids), seed=0, dtype=torch.float64)
    share = (share / share.sum())[ids].to(device)
    size = max(1, TOGETHER // len(ids))

    def field(w: Tensor) -> Tensor:
        """h(w) [P], on the host."""
        theta = w.to(device, torch.float64)
        slope = cohort.mean(exact.gradient(), theta.expand(len(cohort), -1), size)
        return -(share @ slope + train.weight_decay * theta).cpu()

    return field


def times(train: Chain, federation: Federation, rounds: int, weights: Tensor | None = None) -> Tensor:
    """T_0 = 0, T_1, …, T_rounds: the sum of all local steps so far, averaged over clients by p (`weights`)."""
    each = drifts(train, federation, rounds) @ _weights(federation, weights)
    return torch.cat([each.new_zeros(1), each.cumsum(0)])


def drifts(train: Chain, federation: Federation, rounds: int) -> Tensor:
    """The sum of each client's steps in each round, [rounds, clients]: lr · c_i · Σ a_n over its epochs × B_i steps."""
    _check_train(train)
    batches, schedule = train.batches(federation.sizes.cpu()), train.schedule
    found = torch.empty(rounds, len(federation), dtype=torch.float64)
    for count in set(batches.tolist()):
        step = torch.arange(rounds * train.epochs * count)
        factor = torch.ones(len(step), dtype=torch.float64)
        if schedule is not None:
            length = {"steps": 1, "epochs": count, "rounds": count * train.epochs}[schedule.unit]
            factor = schedule.factor((step // length + 1).double())
        found[:, batches == count] = factor.view(rounds, -1).sum(1, keepdim=True)
    return train.lr * found * _own(train, federation)


@dataclass(frozen=True)
class Window:
    """From round `start` on: the `times` [m + 1] after each round, w̄ then (`path` [m + 1, P]), and the solution that
    was at the same place at the beginning (`solution` [m + 1, P])."""

    start: int
    times: Tensor
    path: Tensor
    solution: Tensor

    @property
    def distances(self) -> Tensor:
        """‖w̄ − w^{T_n}‖ after each round, [m + 1]."""
        return (self.path - self.solution).square().sum(1).sqrt()

    @property
    def error(self) -> float:
        """The largest of them."""
        return float(self.distances.max())


@dataclass(frozen=True)
class Tracking:
    """How far w̄ was from the ODE in windows of one length, from growing rounds on."""

    length: float
    windows: tuple[Window, ...]

    @property
    def starts(self) -> list[int]:
        """The rounds at which windows begin."""
        return [window.start for window in self.windows]

    @property
    def errors(self) -> list[float]:
        """The largest distance in each window: with tapering steps it falls to 0."""
        return [window.error for window in self.windows]

    def panels(self, label: str = "w̄") -> Panels:
        """The errors over rounds, and the distance inside each window."""
        over = Panel(
            "Largest distance",
            [Curve(label, [math.log10(start) if start else 0.0 for start in self.starts], self.errors)],
            x_label="log₁₀ round",
            log=True,
        )
        inside = [
            Curve(f"round {w.start}", (w.times[1:] - w.times[0]).tolist(), w.distances[1:].tolist())
            for w in self.windows
        ]
        caption = f"How far w̄ is from the solution of ẇ = h(w) that starts at it, within a time of {self.length:g}."
        return Panels("Tracking the ODE", caption, [over, Panel("In each window", inside, x_label="time", log=True)])

    def plot(self) -> Figure:
        """The same as a figure for a notebook."""
        from consilience.report.drawing.panels import side_by_side
        from consilience.report.figure import Figure

        panels = self.panels()
        return Figure(panels.title, (side_by_side(panels, ["w̄"]),), caption=panels.caption)

    def __repr__(self) -> str:
        found = ", ".join(f"{start}: {error:.3g}" for start, error in zip(self.starts, self.errors, strict=True))
        return f"Tracking(window {self.length:g}; {found})"


def track(
    field: Field, path: Tensor, times: Tensor, starts: Sequence[int] | None = None, window: float = 1.0
) -> Tracking:
    """sup ‖w̄(T_m) − w^{T_n}(T_m)‖ over the rounds m with T_n < T_m ≤ T_n + window, for each n in `starts`.

    `path` [R + 1, P] is w̄ before the first and after every round, `times` [R + 1] its clock. w^{T_n} solves ẇ = h(w)
    from w̄(T_n), by an adaptive Runge–Kutta scheme. Without `starts`, five rounds that grow geometrically, as far as
    windows are long enough and over before the path is.
    """
    if path.dim() != 2 or times.shape != path.shape[:1]:
        raise ConfigError(
            f"path must be [R + 1, P] and times [R + 1], got {tuple(path.shape)} and {tuple(times.shape)}"
        )
    if not window > 0:
        raise ConfigError(f"window must be positive, got {window}")
    path, clock = path.detach().cpu().double(), times.detach().cpu().double()
    chosen = _starts(clock, window) if starts is None else list(starts)
    return Tracking(window, tuple(_window(field, path, clock, start, window) for start in chosen))


class Path:
    """A callback of `fit` that keeps w̄, what the server tells the clients, before the first and after every round."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        self._run: Run | None = None

    def __call__(self, run: Run, line: dict[str, Any]) -> None:
        """After a round. Round 1 begins a new path."""
        if line["round"] == 1:
            self._found = [run.task.initial().cpu()]
        told = run.algorithm.message(run.server, torch.arange(len(run.federation)))
        now = told.theta if isinstance(told, Point) else run.posterior.mean  # not the average of w̄, if there is one
        self._found.append(now.detach().cpu().clone())
        self._run = run

    def __len__(self) -> int:
        return max(0, len(self._found) - 1)

    @property
    def points(self) -> Tensor:
        """w̄ [R + 1, P], in double precision."""
        if self._run is None:
            raise ConfigError("the path is empty: give it to fit, callbacks=[path]")
        if len(self) != len(self._run.history):
            raise ConfigError(
                f"the path has {len(self)} of the run's {len(self._run.history)} rounds, but time is counted from the "
                "first: a resumed run cannot be tracked"
            )
        return torch.stack(self._found).double()

    def track(
        self, starts: Sequence[int] | None = None, window: float = 1.0, weights: Tensor | None = None
    ) -> Tracking:
        """`track` with the field and the clock of the run. `weights` are the server's: those of SAFL are known."""
        points, run = self.points, self._run
        assert run is not None  # points would have said so
        method = run.algorithm
        train = getattr(method, "train", None)
        if not isinstance(train, Chain):
            raise ConfigError(f"{method.name} has no local steps `train` to take the time from: use ode.track")
        if weights is None and not isinstance(method, SAFL):
            raise ConfigError(f"by which weights {method.name} averages is not known here: give weights=, one a client")
        if weights is None and isinstance(method, SAFL) and method.by_examples:
            weights = run.federation.sizes.double()
        field = mean_field(run.task, run.federation, train, weights)
        return track(field, points, times(train, run.federation, len(self), weights), starts, window)


def _check_field(task: Task, federation: Federation) -> None:
    if task.augment is not None:
        raise TaskError("this task changes its inputs at random, and so would its field: make one without augment=")
    if task.networks.has_dropout:
        raise TaskError("this network has dropout, which makes its field random: set it to 0")
    if federation.steps > 1:
        raise DataError("this federation is a stream, whose field changes from round to round: use one step")
    if not bool((federation.sizes > 0).all()):
        raise DataError("a client without examples has no gradient: leave it out")
    clients, work = len(federation) * task.size, federation.examples * task.size
    if clients > MAX_GRADIENTS or work > MAX_WORK:
        raise TaskError(
            f"{task.size:,} parameters are too many for the exact gradients of {len(federation):,} clients with "
            f"{federation.examples:,} examples: parameters × clients may be {MAX_GRADIENTS:.0e} and parameters × "
            f"examples {MAX_WORK:.0e}"
        )


def _check_train(train: Chain) -> None:
    if not isinstance(train, SGD) or train.momentum:
        what = f"momentum {train.momentum:g}" if isinstance(train, SGD) else type(train).__name__
        raise ConfigError(f"only plain SGD moves by step · gradient, as the ODE's clock assumes, not {what}")


def _weights(federation: Federation, weights: Tensor | None) -> Tensor:
    """p, which sums to 1."""
    p = torch.ones(len(federation), dtype=torch.float64) if weights is None else weights.detach().cpu().double()
    if p.shape != (len(federation),) or not bool((p >= 0).all()) or not 0 < float(p.sum()) < math.inf:
        raise ConfigError(f"weights must be {len(federation)} numbers, one a client, none negative")
    return p / p.sum()


def _own(train: Chain, federation: Federation) -> Tensor:
    """c_i, each client's factor on the step size."""
    own = None if train.schedule is None else train.schedule.for_clients(torch.arange(len(federation)))
    return torch.ones(len(federation), dtype=torch.float64) if own is None else own.double().cpu()


def _pull(train: Chain, federation: Federation) -> Tensor:
    """c_i B_i, to which the sum of a client's steps in a round is proportional."""
    _check_train(train)
    batches = train.batches(federation.sizes.cpu())
    if train.schedule is not None and train.schedule.unit == "steps" and len(set(batches.tolist())) > 1:
        raise ConfigError(
            "clients of different sizes that each count their own steps taper at different paces, and the field "
            "changes from round to round: let the schedule count epochs or rounds"
        )
    return batches.double() * _own(train, federation)


def _ends(clock: Tensor, window: float) -> Tensor:
    """For each round the last one in the window that it begins."""
    return torch.searchsorted(clock, clock + window * (1 + 1e-12), right=True) - 1


def _starts(clock: Tensor, window: float) -> list[int]:
    rounds = torch.arange(len(clock))
    fine = (_ends(clock, window) - rounds >= ENOUGH) & (clock + window <= clock[-1]) & (rounds > 0)
    if not bool(fine.any()):
        raise ConfigError(
            f"no window of {window:g} has {ENOUGH} rounds in it and is over before the path, at {float(clock[-1]):g}: "
            "choose another window, or smaller steps and more rounds"
        )
    first, last = (int(found) for found in rounds[fine][[0, -1]])
    return sorted({round(float(start)) for start in np.geomspace(first, last, STARTS)})


def _window(field: Field, path: Tensor, clock: Tensor, start: int, window: float) -> Window:
    if not 0 <= start < len(clock) or float(clock[start]) + window > float(clock[-1]) * (1 + 1e-12):
        raise ConfigError(
            f"the path ends at {float(clock[-1]):g} after {len(clock) - 1} rounds, before the window of {window:g} "
            f"from round {start} is over: run more rounds, or choose a shorter window or an earlier start"
        )
    stop = int(_ends(clock, window)[start])
    if stop - start < ENOUGH:
        raise ConfigError(
            f"the window of {window:g} from round {start} has {stop - start} rounds in it, and needs {ENOUGH}: choose "
            "a longer window, a later start or smaller steps"
        )
    at = slice(start, stop + 1)

    def slope(_: float, w: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return field(torch.from_numpy(w.copy())).numpy()

    begin, knots = path[start].numpy(), clock[at].numpy()
    found = solve_ivp(slope, (knots[0], knots[-1]), begin, t_eval=knots, rtol=RTOL, atol=ATOL)
    if not found.success:
        raise ConsilienceError(f"the ODE could not be solved from round {start} on: {found.message}")
    return Window(start, clock[at], path[at], torch.from_numpy(found.y.T.copy()))
