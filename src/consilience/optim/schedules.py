"""Schedules: factors on the step size `lr` that change during a run.

A schedule is a function of n = 1, 2, …, the number of rounds, local epochs or local steps since the start of the run. A
client counts as if it had taken part in every round, so it needs no memory.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from consilience.core.checks import Count, NonNegative, Proportion, check_types
from consilience.core.errors import ConfigError


@dataclass(frozen=True)
class Schedule(ABC):
    """A factor on lr. `unit` says what n counts; with "rounds" the step size is constant within a round."""

    unit: Literal["steps", "epochs", "rounds"] = "epochs"

    def __post_init__(self) -> None:
        check_types(self)

    @abstractmethod
    def factor(self, n: Tensor) -> Tensor:
        """The factor at n ≥ 1, for n of any shape."""

    def for_clients(self, ids: Tensor) -> Tensor | None:
        """A further factor for each client [K], if the schedule has one."""
        return None

    def count(self, round: int, epoch: int, step: int, epochs: int, batches: Tensor) -> Tensor:
        """n of a step (0-based epoch and step of a 1-based round) for clients with `batches` [K] steps an epoch."""
        if self.unit == "rounds":
            return torch.full_like(batches, round)
        passed = (round - 1) * epochs + epoch
        return torch.full_like(batches, passed + 1) if self.unit == "epochs" else passed * batches + step + 1


@dataclass(frozen=True)
class Tapered(Schedule):
    """1/n^δ. The steps a_n = lr/n^δ have Σ a_n = ∞ and Σ a_n² < ∞, so the mean of the clients' weights follows an ODE
    to its equilibria. This needs ¾ < δ ≤ 1, which is checked; `check=False` admits any δ ≥ 0."""

    delta: NonNegative = 1.0
    check: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.check and not 0.75 < self.delta <= 1:
            raise ConfigError(
                f"delta must lie in (3/4, 1], got {self.delta}: steps must sum to infinity (delta ≤ 1), and the sums "
                "of noise and drift must stay finite (delta > 3/4); check=False admits it"
            )

    def factor(self, n: Tensor) -> Tensor:
        return n**-self.delta


@dataclass(frozen=True)
class Cosine(Schedule):
    """From 1 at n = 1 to `floor` along half a cosine, over `total` units; `floor` after that."""

    total: Count = 100
    floor: Proportion = 0.0

    def factor(self, n: Tensor) -> Tensor:
        share = ((n - 1) / self.total).clamp(max=1)
        return self.floor + (1 - self.floor) * (1 + torch.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class Linear(Schedule):
    """From 1 at n = 1 to `floor` along a line, over `total` units; `floor` after that."""

    total: Count = 100
    floor: Proportion = 0.0

    def factor(self, n: Tensor) -> Tensor:
        return 1 - (1 - self.floor) * ((n - 1) / self.total).clamp(max=1)


@dataclass(frozen=True)
class PerClient(Schedule):
    """Client k's steps are `factors[k]` times those of `of` (constant if None): a_n^(k) = c_k a_n."""

    factors: tuple[NonNegative, ...] = ()
    of: Schedule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.factors:
            raise ConfigError("factors must have one number for each client, got none")
        if self.of is not None and self.of.unit != self.unit:
            raise ConfigError(f"unit is {self.unit!r} here and {self.of.unit!r} in `of`: they must be the same")

    def factor(self, n: Tensor) -> Tensor:
        return torch.ones_like(n) if self.of is None else self.of.factor(n)

    def for_clients(self, ids: Tensor) -> Tensor:
        if int(ids.max()) >= len(self.factors):
            raise ConfigError(
                f"schedule.factors has {len(self.factors)} values, but there is a client {int(ids.max())}"
            )
        return torch.tensor(self.factors, dtype=torch.float64)[ids.cpu()]
