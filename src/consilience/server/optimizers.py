"""Server optimisers (Reddi et al., 2021): the fused update is an ascent direction, and its step is adaptive.

They act on any record leaf by leaf: on weights for FedAvg, on natural parameters for Bayesian methods.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from consilience.core.checks import Fraction, NonNegative, Positive, check_types
from consilience.core.ranges import Range, Ranges
from consilience.core.records import Tree, record, tree_map


@record
class Moments:
    """Running averages of the direction and of its square; None if an optimiser does not use one."""

    first: Tree
    second: Tree


def carry_over(old: Moments, fresh: Moments) -> Moments:
    """The memory of an optimiser that continues after another: moments that both have are kept."""

    def kept(before: Tree, now: Tree) -> Tree:
        return now if before is None or now is None else before

    return Moments(kept(old.first, fresh.first), kept(old.second, fresh.second))


class ServerOptimizer(ABC):
    """A step along a direction. It is pure: its memory is a record."""

    def __post_init__(self) -> None:
        check_types(self)

    @abstractmethod
    def start(self, value: Tree) -> Moments:
        """The memory before the first round."""

    @abstractmethod
    def step(self, value: Tree, direction: Tree, memory: Moments) -> tuple[Tree, Moments]:
        """(value, memory) after one step."""


@dataclass(frozen=True)
class Momentum(ServerOptimizer):
    """m ← ρ m + Δ, x ← x + lr · m. With the defaults, x ← x + Δ: plain averaging, without memory."""

    ranges: ClassVar[Ranges] = {"lr": Range(0.1, 1.5, log=False)}
    lr: Positive = 1.0
    momentum: Fraction = 0.0

    def start(self, value: Tree) -> Moments:
        return Moments(tree_map(torch.zeros_like, value) if self.momentum else None, None)

    def step(self, value: Tree, direction: Tree, memory: Moments) -> tuple[Tree, Moments]:
        first = direction
        if self.momentum:
            first = tree_map(lambda m, d: self.momentum * m + d, memory.first, direction)
        moved = tree_map(lambda x, m: x + self.lr * m, value, first)
        return moved, Moments(first if self.momentum else None, None)


@dataclass(frozen=True)
class Adaptive(ServerOptimizer):
    """m ← β₁ m + (1 − β₁) Δ, x ← x + lr · m / (√v + eps), without bias correction. Subclasses define v, which starts at
    `accumulator`."""

    ranges: ClassVar[Ranges] = {"lr": Range(1e-3, 0.3)}
    lr: Positive = 0.01
    beta1: Fraction = 0.9
    eps: Positive = 1e-3
    accumulator: NonNegative = 0.0

    @abstractmethod
    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The next v from Δ²."""

    def start(self, value: Tree) -> Moments:
        second = tree_map(lambda x: torch.full_like(x, self.accumulator), value)
        return Moments(tree_map(torch.zeros_like, value), second)

    def step(self, value: Tree, direction: Tree, memory: Moments) -> tuple[Tree, Moments]:
        first = tree_map(lambda m, d: self.beta1 * m + (1 - self.beta1) * d, memory.first, direction)
        second = tree_map(lambda v, d: self.second(v, d.square()), memory.second, direction)
        moved = tree_map(lambda x, m, v: x + self.lr * m / (v.sqrt() + self.eps), value, first, second)
        return moved, Moments(first, second)


@dataclass(frozen=True)
class Adam(Adaptive):
    """v ← β₂ v + (1 − β₂) Δ²."""

    beta2: Fraction = 0.99

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class Yogi(Adaptive):
    """v ← v − (1 − β₂) Δ² sign(v − Δ²): v changes by at most (1 − β₂) Δ², so it falls slowly."""

    beta2: Fraction = 0.99

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)


@dataclass(frozen=True)
class AdaGrad(Adaptive):
    """v ← v + Δ², and no momentum by default."""

    beta1: Fraction = 0.0

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square
