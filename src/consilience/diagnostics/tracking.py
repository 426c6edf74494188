"""The distance of the mean of the clients' weights from the solution of its ODE, in windows of time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from consilience.core.errors import ConfigError, ConsilienceError
from consilience.diagnostics.field import Field
from consilience.figures.panels import Curve, Panel, Panels

if TYPE_CHECKING:
    from consilience.report.figure import Figure

STARTS = 5
ENOUGH = 2  # rounds in a window
RTOL, ATOL = 1e-8, 1e-10


@dataclass(frozen=True)
class Window:
    """Rounds from `start`: `times` [m + 1] after each round, w̄ at these times (`path` [m + 1, P]), and the solution of
    the ODE from the same point (`solution` [m + 1, P])."""

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
    """The distance of w̄ from the ODE in windows of one length, from growing rounds."""

    length: float
    windows: tuple[Window, ...]

    @property
    def starts(self) -> list[int]:
        return [window.start for window in self.windows]

    @property
    def errors(self) -> list[float]:
        """The largest distance in each window; with steps C/n it falls to 0."""
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
        caption = (
            f"The distance of w̄ from the solution of ẇ = h(w) that starts at it, within a time of {self.length:g}."
        )
        return Panels("Tracking the ODE", caption, [over, Panel("In each window", inside, x_label="time", log=True)])

    def plot(self) -> Figure:
        """The panels as a figure for a notebook."""
        from consilience.report.drawing.panels import side_by_side  # imports matplotlib
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

    `path` [R + 1, P] is w̄ before the first and after each round, `times` [R + 1] its clock. w^{T_n} solves ẇ = h(w)
    from w̄(T_n), by an adaptive Runge–Kutta scheme. None for `starts` chooses five rounds that grow geometrically,
    among those whose windows hold enough rounds and end before the path does."""
    if path.dim() != 2 or times.shape != path.shape[:1]:
        raise ConfigError(
            f"path must be [R + 1, P] and times [R + 1], got {tuple(path.shape)} and {tuple(times.shape)}"
        )
    if not window > 0:
        raise ConfigError(f"window must be positive, got {window}")
    path, clock = path.detach().cpu().double(), times.detach().cpu().double()
    chosen = _starts(clock, window) if starts is None else list(starts)
    return Tracking(window, tuple(_window(field, path, clock, start, window) for start in chosen))


def _ends(clock: Tensor, window: float) -> Tensor:
    """The last round in the window of each round."""
    return torch.searchsorted(clock, clock + window * (1 + 1e-12), right=True) - 1


def _starts(clock: Tensor, window: float) -> list[int]:
    rounds = torch.arange(len(clock))
    fine = (_ends(clock, window) - rounds >= ENOUGH) & (clock + window <= clock[-1]) & (rounds > 0)
    if not bool(fine.any()):
        raise ConfigError(
            f"no window of {window:g} has {ENOUGH} rounds in it and ends before the path, at {float(clock[-1]):g}: "
            "choose another window, or smaller steps and more rounds"
        )
    first, last = (int(found) for found in rounds[fine][[0, -1]])
    return sorted({round(float(start)) for start in np.geomspace(first, last, STARTS)})


def _window(field: Field, path: Tensor, clock: Tensor, start: int, window: float) -> Window:
    if not 0 <= start < len(clock) or float(clock[start]) + window > float(clock[-1]) * (1 + 1e-12):
        raise ConfigError(
            f"the path ends at {float(clock[-1]):g} after {len(clock) - 1} rounds, before the window of {window:g} "
            f"from round {start} does: run more rounds, or choose a shorter window or an earlier start"
        )
    stop = int(_ends(clock, window)[start])
    if stop - start < ENOUGH:
        raise ConfigError(
            f"the window of {window:g} from round {start} has {stop - start} rounds in it, and needs {ENOUGH}: choose "
            "a longer window, a later start or smaller steps"
        )
    at = slice(start, stop + 1)

    def derivative(_: float, w: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return field(torch.from_numpy(w.copy())).numpy()

    begin, knots = path[start].numpy(), clock[at].numpy()
    found = solve_ivp(derivative, (knots[0], knots[-1]), begin, t_eval=knots, rtol=RTOL, atol=ATOL)
    if not found.success:
        raise ConsilienceError(f"the ODE could not be solved from round {start} on: {found.message}")
    return Window(start, clock[at], path[at], torch.from_numpy(found.y.T.copy()))
