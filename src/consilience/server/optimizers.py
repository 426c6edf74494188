"""Server optimisers (Reddi et al., 2021): the fused update is an ascent direction, its step is adaptive.

They act on any record leaf by leaf: on weights for FedAvg, on natural parameters for Bayesian methods.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from consilience.core.errors import ConfigError
from consilience.core.ranges import Range, Ranges
from consilience.core.records import Tree, record, tree_map


@record
class Moments:
    """Running averages of the direction and of its square; None where an optimiser has no need of one."""

    first: Tree
    second: Tree


def carry_over(old: Moments, fresh: Moments) -> Moments:
    """The memory of an optimiser that goes on where another stopped: what both have is kept."""

    def kept(before: Tree, now: Tree) -> Tree:
        return now if before is None or now is None else before

    return Moments(kept(old.first, fresh.first), kept(old.second, fresh.second))


class ServerOptimizer(ABC):
    """A step along a direction: pure, its memory is a record."""

    @abstractmethod
    def start(self, value: Tree) -> Moments:
        """The memory before the first round."""

    @abstractmethod
    def step(self, value: Tree, direction: Tree, memory: Moments) -> tuple[Tree, Moments]:
        """The value after one step, and the memory of it."""


@dataclass(frozen=True)
class Momentum(ServerOptimizer):
    """m ← ρ m + Δ, x ← x + lr · m. With the defaults, x ← x + Δ: plain averaging."""

    ranges: ClassVar[Ranges] = {"lr": Range(0.1, 1.5, log=False)}
    lr: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf or not 0 <= self.momentum < 1:
            raise ConfigError(f"lr must be positive, finite, and momentum in [0, 1), got {self.lr} and {self.momentum}")

    def start(self, value: Tree) -> Moments:
        """No memory without momentum."""
        return Moments(tree_map(torch.zeros_like, value) if self.momentum else None, None)

    def step(self, value: Tree, direction: Tree, memory: Moments) -> tuple[Tree, Moments]:
        """A step along the running sum."""
        first = direction
        if self.momentum:
            first = tree_map(lambda m, d: self.momentum * m + d, memory.first, direction)
        moved = tree_map(lambda x, m: x + self.lr * m, value, first)
        return moved, Moments(first if self.momentum else None, None)


@dataclass(frozen=True)
class Adaptive(ServerOptimizer):
    """m ← β₁ m + (1 − β₁) Δ, x ← x + lr · m / (√v + eps), without bias correction; kinds differ in v."""

    ranges: ClassVar[Ranges] = {"lr": Range(1e-3, 0.3)}
    lr: float = 0.01
    beta1: float = 0.9
    eps: float = 1e-3
    accumulator: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.lr < math.inf and self.eps > 0 and 0 <= self.beta1 < 1 and self.accumulator >= 0):
            raise ConfigError(
                "lr and eps must be positive and finite, beta1 in [0, 1) and accumulator not negative, "
                f"got lr={self.lr}, eps={self.eps}, beta1={self.beta1}, accumulator={self.accumulator}"
            )

    @abstractmethod
    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The next v from Δ²."""

    def start(self, value: Tree) -> Moments:
        """m = 0, v = accumulator."""
        return Moments(
            tree_map(torch.zeros_like, value), tree_map(lambda x: torch.full_like(x, self.accumulator), value)
        )

    def step(self, value: Tree, direction: Tree, memory: Moments) -> tuple[Tree, Moments]:
        """A step along m, scaled by 1/√v."""
        first = tree_map(lambda m, d: self.beta1 * m + (1 - self.beta1) * d, memory.first, direction)
        second = tree_map(lambda v, d: self.second(v, d.square()), memory.second, direction)
        moved = tree_map(lambda x, m, v: x + self.lr * m / (v.sqrt() + self.eps), value, first, second)
        return moved, Moments(first, second)


def _check_beta2(beta2: float) -> None:
    if not 0 <= beta2 < 1:
        raise ConfigError(f"beta2 must lie in [0, 1), got {beta2}")


@dataclass(frozen=True)
class Adam(Adaptive):
    """v ← β₂ v + (1 − β₂) Δ²."""

    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_beta2(self.beta2)

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """An exponential average."""
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class Yogi(Adaptive):
    """v ← v − (1 − β₂) Δ² sign(v − Δ²): moves by Δ² at most, so v falls slowly."""

    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_beta2(self.beta2)

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """A step of size (1 − β₂) Δ² towards Δ²."""
        return v - (1 - self.beta2) * square * torch.sign(v - square)


@dataclass(frozen=True)
class AdaGrad(Adaptive):
    """v ← v + Δ², and no momentum by default."""

    beta1: float = 0.0

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """A running sum."""
        return v + square
