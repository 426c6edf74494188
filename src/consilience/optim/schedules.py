"""Schedules: how a client's steps change while a run goes on, as a factor on the step size `lr`.

A schedule is a function of n = 1, 2, …, which counts rounds, local epochs, or local steps over the whole run: a client
counts as if it had taken part in every round, so that it needs no memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from consilience.core.errors import ConfigError

Unit = Literal["steps", "epochs", "rounds"]
UNITS = ("steps", "epochs", "rounds")


@dataclass(frozen=True)
class Schedule(ABC):
    """A factor on lr. `unit` is what n counts: a unit of "rounds" is a step that is constant within a round."""

    unit: Unit = "epochs"

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ConfigError(f"unit must be one of {', '.join(UNITS)}, got {self.unit!r}")

    @abstractmethod
    def factor(self, n: Tensor) -> Tensor:
        """For n ≥ 1 of any shape."""

    def for_clients(self, ids: Tensor) -> Tensor | None:
        """A further factor of each client's own [K], if there is one."""
        return None

    def count(self, round: int, epoch: int, step: int, epochs: int, batches: Tensor) -> Tensor:
        """n of a step (0-based epoch and step of a 1-based round) for clients with `batches` [K] steps an epoch."""
        if self.unit == "rounds":
            return torch.full_like(batches, round)
        passed = (round - 1) * epochs + epoch
        return torch.full_like(batches, passed + 1) if self.unit == "epochs" else passed * batches + step + 1


@dataclass(frozen=True)
class Tapered(Schedule):
    """1/n^δ: steps a_n = lr/n^δ with Σ a_n = ∞ and Σ a_n² < ∞, so that the mean of the clients' weights follows an ODE
    to its equilibria. That needs ¾ < δ ≤ 1, which is checked; `check=False` takes any δ ≥ 0."""

    delta: float = 1.0
    check: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.check and not 0.75 < self.delta <= 1:
            raise ConfigError(
                f"delta must lie in (3/4, 1], got {self.delta}: steps must sum to infinity (delta ≤ 1), and what noise "
                "and drift add up to must stay finite (delta > 3/4); check=False takes it all the same"
            )
        if not 0 <= self.delta < math.inf:
            raise ConfigError(f"delta must not be negative, got {self.delta}")

    def factor(self, n: Tensor) -> Tensor:
        """n^−δ."""
        return n**-self.delta


@dataclass(frozen=True)
class Cosine(Schedule):
    """From 1 to `floor` along half a cosine, over `total` units; `floor` from there on."""

    total: int = 100
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.total < 1 or not 0 <= self.floor <= 1:
            raise ConfigError(f"total must be at least 1 and floor in [0, 1], got {self.total} and {self.floor}")

    def factor(self, n: Tensor) -> Tensor:
        """1 at n = 1."""
        share = ((n - 1) / self.total).clamp(max=1)
        return self.floor + (1 - self.floor) * (1 + torch.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class PerClient(Schedule):
    """Client k's steps are `factors[k]` times those of `of` (constant if None): a_n^(k) = c_k a_n."""

    factors: tuple[float, ...] = ()
    of: Schedule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.factors or not all(0 <= factor < math.inf for factor in self.factors):
            raise ConfigError(f"factors must be one for each client, none negative, got {self.factors}")
        if self.of is not None and self.of.unit != self.unit:
            raise ConfigError(f"unit is {self.unit!r} here and {self.of.unit!r} in `of`: they must be the same")

    def factor(self, n: Tensor) -> Tensor:
        """That of the schedule inside."""
        return torch.ones_like(n) if self.of is None else self.of.factor(n)

    def for_clients(self, ids: Tensor) -> Tensor:
        """c_k."""
        if int(ids.max()) >= len(self.factors):
            raise ConfigError(
                f"schedule.factors has {len(self.factors)} values, but there is a client {int(ids.max())}"
            )
        return torch.tensor(self.factors, dtype=torch.float64)[ids.cpu()]
