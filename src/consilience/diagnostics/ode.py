"""A test of SA-FL's theorem: does the mean of the clients' weights follow its ODE?

Clients take gradient steps and the server averages, so w̄ is a noisy Euler scheme of ẇ = h(w). Its clock after n rounds
is T_n, the sum of all steps so far.

path = ode.Path()
run = consilience.fit(SAFL(train), task, federation, rounds=500, callbacks=[path])
found = path.track(window=1.0)
found.plot()

The theorem: with steps that sum to infinity and whose squares have a finite sum, the largest distance of w̄ from the
solution that starts at w̄(T_n), over any window [T_n, T_n + T] of fixed length, goes to 0 as n grows. The theorem gives
no rate. It does not say that w̄ follows one solution for ever, because a new one starts in each window, nor that w̄ ends
at a good place. With constant steps the distance stays as large as noise and drift make it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from consilience.algorithms.safl import SAFL
from consilience.core import ConfigError, Point
from consilience.diagnostics.field import drifts, mean_field, times
from consilience.diagnostics.tracking import Tracking, Window, track
from consilience.optim import Chain
from consilience.runs.run import Run

__all__ = ["Path", "Tracking", "Window", "drifts", "mean_field", "times", "track"]


class Path:
    """A callback of `fit` that keeps w̄, the server's message, before the first and after each round."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        self._run: Run | None = None

    def __call__(self, run: Run, line: dict[str, Any]) -> None:
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
                f"the path has {len(self)} of the run's {len(self._run.history)} rounds, but its clock starts at the "
                "first: a resumed run cannot be tracked"
            )
        return torch.stack(self._found).double()

    def track(
        self, starts: Sequence[int] | None = None, window: float = 1.0, weights: Tensor | None = None
    ) -> Tracking:
        """`track` with the field and the clock of the run. `weights` are the server's; only those of SAFL are known."""
        points, run = self.points, self._run
        assert run is not None  # points would have said so
        method = run.algorithm
        train = getattr(method, "train", None)
        if not isinstance(train, Chain):
            raise ConfigError(f"{method.name} has no local optimiser `train` to take the clock from: use ode.track")
        if weights is None and not isinstance(method, SAFL):
            raise ConfigError(
                f"the weights by which {method.name} averages are not known here: give weights=, one for each client"
            )
        if weights is None and isinstance(method, SAFL) and method.by_examples:
            weights = run.federation.sizes.double()
        field = mean_field(run.task, run.federation, train, weights)
        return track(field, points, times(train, run.federation, len(self), weights), starts, window)
