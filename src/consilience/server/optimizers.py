"""Server optimisers (Reddi et al., 2021): the fused update is an ascent direction, and its step is adaptive.

They act on any record leaf by leaf, such as the weights of FedAvg. Of a Gaussian, `Momentum` steps the natural
parameters, and adaptive optimisers step the mean.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from consilience.core import guards
from consilience.core.checks import Fraction, NonNegative, Positive, check_types
from consilience.core.errors import ConfigError
from consilience.core.gaussian import FLOOR, Gaussian
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
    `accumulator`. With `eps_inside_root` the divisor is √(v + eps), as in optax, and eps is about the square of the
    other one.

    A Gaussian's mean takes this step, along Δμ = (Δη − ΔΛ μ) / Λ, and Λ ← max(Λ + ΔΛ, Λ/10). A factor that has the mean
    of q, such as that of a client which says nothing about a weight, then leaves the mean where it is. Steps of η and Λ
    with normalisers of their own would not: each would have the length lr, whatever the factor says."""

    ranges: ClassVar[Ranges] = {"lr": Range(1e-3, 0.3)}
    lr: Positive = 0.01
    beta1: Fraction = 0.9
    eps: Positive = 1e-3
    accumulator: NonNegative = 0.0
    eps_inside_root: bool = field(default=False, kw_only=True)

    @abstractmethod
    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The next v from Δ²."""

    def start(self, value: Tree) -> Moments:
        value = _stepped(value)
        second = tree_map(lambda x: torch.full_like(x, self.accumulator), value)
        return Moments(tree_map(torch.zeros_like, value), second)

    def step(self, value: Tree, direction: Tree, memory: Moments) -> tuple[Tree, Moments]:
        if isinstance(value, Gaussian):
            mean, memory = self.step(value.mean, _change_of_mean(value, direction), memory)
            return Gaussian.of(mean, _tempered(value.lam, direction.lam)), memory
        first = tree_map(lambda m, d: self.beta1 * m + (1 - self.beta1) * d, memory.first, direction)
        second = tree_map(lambda v, d: self.second(v, d.square()), memory.second, direction)
        moved = tree_map(lambda x, m, v: x + self.lr * m / self._divisor(v), value, first, second)
        return moved, Moments(first, second)

    def _divisor(self, v: Tensor) -> Tensor:
        return (v + self.eps).sqrt() if self.eps_inside_root else v.sqrt() + self.eps


def _stepped(value: Tree) -> Tree:
    """What an adaptive optimiser steps: a Gaussian's mean, or the value itself."""
    if not isinstance(value, Gaussian):
        return value
    if value.full:
        raise ConfigError(
            "adaptive server optimisers scale the steps of single weights, and a full precision couples the weights: "
            "take cs.server.Momentum, or an inference with a diagonal precision"
        )
    return value.eta


def _change_of_mean(q: Gaussian, delta: Gaussian) -> Tensor:
    """(Δη − ΔΛ μ) / Λ."""
    return (delta.eta - delta.lam * q.mean) / q.proper().lam


def _tempered(lam: Tensor, change: Tensor) -> Tensor:
    """max(Λ + ΔΛ, Λ/10), and never below what a mean needs; the entries that would be less than Λ/10 are counted."""
    guards.count("precision falls to a tenth", lam + change < lam / 10)
    return (lam + change).maximum(lam / 10).clamp_min(FLOOR)


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
