"""Baseline hazards of Cox's model: Breslow's estimator, from sums over examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core import DataError, keys


@dataclass(frozen=True)
class HazardSums:
    """At each of `times` [T]: the number of events [T], and Σ e^η over the examples at risk for each of M networks
    [M, T]. Those of clients at the same times add up."""

    times: Tensor
    events: Tensor
    at_risk: Tensor

    @classmethod
    def of(cls, eta: Tensor, y: Tensor, times: Tensor) -> HazardSums:
        """The sums of examples with log hazards [M, N] and targets [N, 2]."""
        time, order = y[:, 0].double().sort()
        event, eta = y[order, 1].double(), eta[:, order].double()
        place = torch.searchsorted(times, time[event > 0])
        hits = torch.isin(time[event > 0], times)
        events = torch.bincount(place[hits], minlength=len(times)).double()
        tail = torch.nn.functional.pad(eta.exp(), (0, 1)).flip(1).cumsum(1).flip(1)
        return cls(times, events, tail[:, torch.searchsorted(time, times)])

    def __add__(self, other: HazardSums) -> HazardSums:
        return HazardSums(self.times, self.events + other.events, self.at_risk + other.at_risk)

    def cumulative(self, seed: int | None = None) -> Tensor:
        """The cumulative baseline hazard Σ d / Σ e^η after each time [M, T]; with a seed, one draw for each network of
        its posterior under a flat prior, whose steps are Gamma(d, Σ e^η)."""
        steps = self.events.expand_as(self.at_risk)
        if seed is not None:
            steps = _gamma(steps, seed)
        return (steps / self.at_risk.clamp_min(torch.finfo(torch.float64).tiny)).cumsum(1)


def _gamma(shape: Tensor, seed: int) -> Tensor:
    """Gamma(shape, 1) for each entry [M, T], 0 where the shape is 0, by the inverse distribution function."""
    from scipy.special import gammaincinv  # slow to import

    key = keys.key(seed, purpose="baseline hazard")
    u = keys.uniform(key, shape.numel(), torch.float64).view(shape.shape)
    drawn = torch.from_numpy(gammaincinv(shape.clamp_min(1).numpy(), u.numpy()))
    return torch.where(shape > 0, drawn, 0)


def event_times(targets: Sequence[Tensor]) -> Tensor:
    """The distinct times of events in targets [N, 2] of several clients; an error if there is none."""
    times: Tensor = torch.unique(torch.cat([y[y[:, 1] > 0, 0].double() for y in targets]))
    if not len(times):
        raise DataError("there is no event, so a baseline hazard is not defined: ask for that of all clients")
    return times


def at(curve: Tensor, knots: Tensor, times: Tensor) -> Tensor:
    """A step function that is 0 before the first knot and `curve` [..., K] from each knot on, at some times."""
    found: Tensor = torch.nn.functional.pad(curve, (1, 0))[..., torch.searchsorted(knots, times, right=True)]
    return found
