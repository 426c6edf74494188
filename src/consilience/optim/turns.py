"""Turns: which entries of θ take a step on a batch, and along which gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from consilience.compute.replay import at_theta
from consilience.compute.vectorize import stepper
from consilience.core import guards
from consilience.core.gaussian import Gaussian
from consilience.core.records import Tree, rows
from consilience.data.batch import Batch

Memory = tuple[Tensor, ...]
Gradient = Callable[..., tuple[Tensor, Tensor]]  # (θ, batch, *own, shared=) → (gradient [k, P], loss [k])
StepSize = float | Tensor  # one for all, one for each client [k, 1], or one for each parameter [k, P]
# Called after a step with (the number of steps that its clients have taken in this round [k, 1], θ [k, P]). It may
# change θ in place.
Look = Callable[[Tensor, Tensor], None]


class Steps(Protocol):
    """What a `Mover` needs of a chain."""

    @property
    def lr(self) -> float:
        """The step size."""

    @property
    def schedule(self) -> object:
        """What changes the step size, or None."""

    @property
    def decay(self) -> float:
        """The weight decay that is part of the gradient."""

    @property
    def preconditions(self) -> bool:
        """Whether stiff priors do no harm."""

    @property
    def looks_around(self) -> bool:
        """Whether a step needs gradients elsewhere than at θ."""

    def memory(self, theta: Tensor) -> Memory:
        """What steps remember."""

    def advance(self, theta: Tensor, g: Tensor, /, *now: Any) -> None:
        """The step along the whole gradient, in place."""

    def probed(
        self, gradient: Callable[[Tensor], tuple[Tensor, Tensor]], theta: Tensor, *now: Any
    ) -> tuple[Tensor, Tensor]:
        """The gradient and the loss of a step."""

    def __hash__(self) -> int:
        """Equal chains have equal hashes."""


@dataclass(frozen=True)
class Turn:
    """The entries [start, stop) of θ step along a gradient of their own, after the first of every `every` batches of an
    epoch. `look` is called after these steps only."""

    gradient: Gradient
    start: int
    stop: int
    every: int = 1
    look: Look | None = None


class Mover:
    """A turn in one round: its memory, its steps, and its guard against stiff priors. `size` is that of θ."""

    def __init__(
        self,
        chain: Steps,
        turn: Turn,
        theta: Tensor,
        *,
        memory: Memory | None,
        prior: Gaussian | None,
        pace: Tensor | None,
        running: Tensor | None,
    ) -> None:
        self.turn, self.whole = turn, (turn.start, turn.stop) == (0, theta.shape[1])
        self.memory = chain.memory(self._mine(theta)) if memory is None else memory
        self.prior = None if prior is None else self._factor(prior)
        self.running = None if running is None else self._mine(running)
        self.pace = None if pace is None else self._mine(pace)
        self.guard = Stiffness(chain, None if chain.preconditions else self.prior, self.pace)
        if self.prior is not None and chain.decay:
            decay = theta.new_full((1,), chain.decay)
            self.prior = self.prior * Gaussian(torch.zeros_like(self.prior.eta), decay)
        if self.whole:
            passes = 1 + len(self.memory) + (prior is not None) + bool(chain.decay) + (running is not None)
            self.step = stepper(turn.gradient, chain.advance, chain.probed, passes, whole=True)
        else:
            self.step = stepper(turn.gradient, _part(chain, turn.start, turn.stop).advance, at_theta)
        self.taken = theta.new_zeros(len(theta), 1)

    def _mine(self, values: Tensor) -> Tensor:
        return values if self.whole else values[..., self.turn.start : self.turn.stop]

    def _factor(self, prior: Gaussian) -> Gaussian:
        if self.whole:
            return prior
        assert not prior.full
        lam = prior.lam if prior.lam.shape[-1] == 1 else self._mine(prior.lam).contiguous()
        return Gaussian(self._mine(prior.eta).contiguous(), lam)

    def __call__(
        self,
        theta: Tensor,
        batch: Batch,
        own: tuple[Tree, ...],
        shared: tuple[Tree, ...],
        n: Tensor,
        noise: Tensor | None,
        lr: StepSize,
    ) -> Tensor:
        """The losses [k] of the first k clients at θ [k, P], which is moved in place. Noise is that of all of θ."""
        k = len(theta)
        size = lr if self.pace is None else lr * self.pace
        held = None if self.prior is None else self.prior.first(k)
        kept = (tuple(part[:k] for part in self.memory), held, self.guard(k, size), self.running)
        fresh = (n, None if noise is None else self._mine(noise), size)
        value = self.step(theta, batch, rows(own, slice(k)), shared, kept, fresh)
        if self.turn.look is not None:
            self.taken[:k] += 1
            self.turn.look(self.taken[:k], theta)
        return value


@dataclass(frozen=True)
class _Part:
    """A chain's step of the entries [start, stop) of θ."""

    chain: Steps
    start: int
    stop: int

    def advance(
        self,
        theta: Tensor,
        g: Tensor,
        memory: Memory,
        prior: Gaussian | None,
        stiffness: Tensor | None,
        running: Tensor | None,
        n: Tensor,
        noise: Tensor | None,
        lr: StepSize,
    ) -> None:
        mine, own = theta[:, self.start : self.stop], g[:, self.start : self.stop]
        self.chain.advance(mine, own, memory, prior, stiffness, running, n, noise, lr)


@cache
def _part(chain: Steps, start: int, stop: int) -> _Part:
    """The same object for equal arguments: recorded steps are found again by it."""
    assert not chain.looks_around
    return _Part(chain, start, stop)


class Stiffness:
    """max(1, step · Λ) of every step; None where no entry exceeds 1. Entries that do are counted once a round."""

    def __init__(self, chain: Steps, prior: Gaussian | None, pace: Tensor | None) -> None:
        self.lam = None if prior is None or prior.full else prior.lam
        self.constant, self.counted = chain.schedule is None, False
        if self.lam is not None and self.constant:
            self.stiff = self._at(self.lam, chain.lr if pace is None else chain.lr * pace)

    def __call__(self, k: int, size: StepSize) -> Tensor | None:
        if self.lam is None:
            return None
        if not self.constant:
            return self._at(self.lam[:k] if self.lam.dim() > 1 else self.lam, size)
        return self.stiff[:k] if self.stiff is not None and self.stiff.dim() > 1 else self.stiff

    def _at(self, lam: Tensor, size: StepSize) -> Tensor | None:
        stiff = lam * size
        if not self.counted:
            guards.count("stiff prior", stiff > 1)
            self.counted = True
        return stiff.clamp_min(1) if bool((stiff > 1).any()) else None
