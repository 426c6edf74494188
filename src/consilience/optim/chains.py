"""Chains: what a client's weights do while they meet its data, one sample an epoch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from consilience.compute.vectorize import stepper
from consilience.core import guards
from consilience.core.checks import check_types
from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.core.ranges import Range, Ranges
from consilience.core.records import rows
from consilience.data.cohort import Cohort
from consilience.optim.schedules import Schedule

Memory = tuple[Tensor, ...]
Pace = float | Tensor
# After a step: (how many its clients have taken in this round [k, 1], θ [k, P]), which it may change.
Look = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Chain(ABC):
    """θ moves along g = ∇loss + prior's slope + weight_decay · θ, a batch at a time; kinds differ in how.

    Nearly every local objective in this field is the data loss plus the energy of a Gaussian: `prior`. The loss is a
    mean over examples, so a prior on the scale of a client's n examples enters as its n-th root. A stiff prior cannot
    be followed with steps longer than 1/Λ: where lr · Λ > 1 (diagonal or scalar Λ) slopes are divided by it.
    A `schedule` changes the step size while the run goes on; without one it is lr throughout. A task may have a `pace`,
    parameter by parameter. With `longest` an epoch ends after so many batches.
    """

    ranges: ClassVar[Ranges] = {"lr": Range(1e-3, 1.0)}
    lr: float = 0.05
    epochs: int = 1
    batch_size: int = 20
    weight_decay: float = 0.0
    schedule: Schedule | None = None
    longest: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_types(self)
        for name, low in {"lr": 0, "epochs": 1, "batch_size": 1, "weight_decay": 0, "longest": 1}.items():
            value = getattr(self, name)
            if value is not None and not low <= value < math.inf:  # nan included
                raise ConfigError(f"{name} must be {'finite' if value == math.inf else f'at least {low}'}, got {value}")

    @abstractmethod
    def move(self, theta: Tensor, memory: Memory, slope: Tensor, n: Tensor, noise: Tensor | None, lr: Pace) -> None:
        """One step of θ [k, P] and of the memory, in place, with steps lr: one for all, [k, 1] or [k, P]. `slope` is
        fresh and may be changed; n [k, 1] are examples, noise [k, P] is N(0, 1) for a chain that is `shaken`."""

    @property
    def shaken(self) -> bool:
        """Whether steps have noise."""
        return False

    def pace(self, cohort: Cohort, epoch: int, step: int, k: int) -> Pace:
        """The step size of the first k clients at a step of the round: one for all, or one each [k, 1]."""
        if self.schedule is None:
            return self.lr
        by_steps = self.schedule.unit == "steps"  # else n is the same for all, and the device is not asked
        batches = self.batches(cohort.n[:k, 0]) if by_steps else torch.ones(1, dtype=torch.float64)
        factor = self.schedule.factor(self.schedule.count(cohort.round, epoch, step, self.epochs, batches))
        own = self.schedule.for_clients(cohort.ids[:k])
        if own is None and not by_steps:
            return self.lr * float(factor)
        factor = factor if own is None else factor.to(cohort.device) * own.to(cohort.device)
        return (self.lr * factor).to(cohort.n.dtype).unsqueeze(1)

    def batches(self, n: Tensor) -> Tensor:
        """How many steps an epoch has for clients with n examples."""
        return (n.double() / self.batch_size).ceil().clamp_max(math.inf if self.longest is None else self.longest)

    def steps(self, cohort: Cohort) -> Tensor:
        """How many steps clients take in a round, [K, 1]."""
        return self.epochs * self.batches(cohort.n).to(cohort.n)

    def time(self, cohort: Cohort, relative: Tensor | None = None) -> Tensor:
        """The sum of the step sizes of clients in a round, [K, 1]: without a schedule lr · steps. Where a task has a
        `relative` pace it is that of every parameter, [K, P]."""
        if relative is not None:
            return self.time(cohort) * relative
        if self.schedule is None:
            return self.lr * self.steps(cohort)
        total, batches = torch.zeros_like(cohort.n), self.batches(cohort.n)
        by_steps = self.schedule.unit == "steps"
        for epoch in range(self.epochs):
            for step in range(int(batches.max()) if by_steps else 1):
                pace = self.pace(cohort, epoch, step, len(cohort))
                total += pace * ((step < batches) if by_steps else batches).to(cohort.n)
        return total

    def memory(self, theta: Tensor) -> Memory:
        """What `move` remembers from step to step: tensors with the client axis of θ [K, P], 0 at a round's start."""
        return ()

    def iterates(
        self,
        gradient: Callable[..., tuple[Tensor, Tensor]],
        theta: Tensor,
        cohort: Cohort,
        *own: Any,
        prior: Gaussian | None = None,
        shared: tuple[Any, ...] = (),
        average: bool = False,
        burn_in: int = 0,
        look: Look | None = None,
    ) -> Iterator[Tensor]:
        """After every epoch the parameters [K, P] of every client, from θ [P] or [K, P]: the last ones, or the mean
        over the epoch's steps if `average`, after `burn_in` epochs. `own` and `prior` are cut to the clients that still
        have a batch; `look` is called after every step. The same tensor is yielded every time: copy what must last."""
        theta = theta.expand(len(cohort), -1).clone()
        memory, relative, taken = self.memory(theta), getattr(gradient, "pace", None), torch.zeros_like(cohort.n)
        loss, seen, steps = (torch.zeros_like(cohort.n[:, 0]) for _ in range(3))
        total = torch.zeros_like(theta) if average else theta
        stiff, step_along = _stiffness(prior, self.lr), stepper(gradient, self.advance)
        if prior is not None and self.weight_decay:
            decay = theta.new_full((1,), self.weight_decay)
            prior = prior * Gaussian(torch.zeros_like(prior.eta), decay)
        for epoch in range(self.epochs):
            averaged = average and epoch >= burn_in
            loss.zero_()
            seen.zero_()
            if averaged:
                total.zero_()
                steps.zero_()
            for step, (k, batch) in enumerate(islice(cohort.epoch(epoch, self.batch_size), self.longest)):
                now = theta[:k]
                noise = cohort.noise(k, theta.shape[1], tag=f"chain {epoch} {step}") if self.shaken else None
                pace = self.pace(cohort, epoch, step, k)
                pace = pace if relative is None else pace * relative[: theta.shape[1]]
                held = None if prior is None else prior.first(k)
                firm = stiff[:k] if stiff is not None and stiff.dim() > 1 else stiff
                kept = (tuple(part[:k] for part in memory), held, firm)
                value = step_along(now, batch, rows(own, slice(k)), shared, kept, (cohort.n[:k], noise, pace))
                loss[:k] += value * batch.w.sum(1)
                seen[:k] += batch.w.sum(1)
                if look is not None:
                    taken[:k] += 1
                    look(taken[:k], now)
                if averaged:
                    total[:k] += now
                    steps[:k] += 1
            cohort.note(loss=loss / seen.clamp_min(1))
            yield total.div_(steps.clamp_min(1).unsqueeze(1)) if averaged else theta

    def advance(
        self,
        theta: Tensor,
        g: Tensor,
        memory: Memory,
        prior: Gaussian | None,
        stiff: Tensor | None,
        n: Tensor,
        noise: Tensor | None,
        lr: Pace,
    ) -> None:
        """The whole slope, and the step along it. All of it is elementwise: compiled, it is one pass over memory."""
        if prior is not None:
            g = prior.pull(g, theta)
        elif self.weight_decay:
            g = torch.add(g, theta, alpha=self.weight_decay)
        if stiff is not None:
            g = g / stiff
        self.move(theta, memory, g, n, noise, lr)

    def __call__(
        self,
        gradient: Callable[..., tuple[Tensor, Tensor]],
        theta: Tensor,
        cohort: Cohort,
        *own: Any,
        prior: Gaussian | None = None,
        shared: tuple[Any, ...] = (),
    ) -> Tensor:
        """The parameters [K, P] after the last epoch."""
        for last in self.iterates(gradient, theta, cohort, *own, prior=prior, shared=shared):
            theta = last
        return theta


@dataclass(frozen=True)
class SGD(Chain):
    """v ← ρ v + g, θ ← θ − lr · v, with v = 0 at the start of each round."""

    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must lie in [0, 1), got {self.momentum}")

    def memory(self, theta: Tensor) -> Memory:
        """v, with momentum only."""
        return (torch.zeros_like(theta),) if self.momentum else ()

    def move(self, theta: Tensor, memory: Memory, slope: Tensor, n: Tensor, noise: Tensor | None, lr: Pace) -> None:
        """Down the running sum of slopes."""
        if memory:
            slope = memory[0].mul_(self.momentum).add_(slope)
        _descend(theta, slope, lr)


@dataclass(frozen=True)
class AMSGrad(Chain):
    """m ← β₁ m + (1 − β₁) g, v ← β₂ v + (1 − β₂) g², u ← max(u, v), θ ← θ − lr · m̂ / (√û + eps), with m̂ = m / (1 − β₁ᵗ)
    and û = u / (1 − β₂ᵗ) at a client's own step t: Adam (Kingma & Ba, 2015) that never forgets a large slope (Reddi et
    al., 2018). All are 0 at the start of each round.

    g is the whole slope: a prior and weight decay are scaled together with the loss, unlike in AdamW."""

    ranges: ClassVar[Ranges] = {"lr": Range(1e-4, 3e-2)}
    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_adam(self.beta1, self.beta2, self.eps)

    def memory(self, theta: Tensor) -> Memory:
        """m, v, u, and t [K, 1]."""
        return torch.zeros_like(theta), torch.zeros_like(theta), torch.zeros_like(theta), _no_steps(theta)

    def move(self, theta: Tensor, memory: Memory, slope: Tensor, n: Tensor, noise: Tensor | None, lr: Pace) -> None:
        """Down the mean of slopes, in units of the largest that they were."""
        first, second, largest, steps = memory
        rest = _moments(first, second, steps, slope, self.beta1, self.beta2)
        torch.maximum(largest, second, out=largest)
        _adam_step(theta, first, largest, rest, slope, lr, self.eps)


@dataclass(frozen=True)
class Adam(Chain):
    """m ← β₁ m + (1 − β₁) g, v ← β₂ v + (1 − β₂) g², θ ← θ − lr · m̂ / (√v̂ + eps) (Kingma & Ba, 2015), with m = v = 0 at
    the start of each round; as a server optimiser it is `Adam`.

    `noise` is the deviation of what is added to every g at random. Some codes of Bayesian GANs sample so, by a loss
    0.03 Σ θ ξ with ξ ~ N(0, 0.02²), noise = 6e-4. It shakes weights that have small slopes and is no sampler of a known
    distribution: Adam divides by the noise, too."""

    ranges: ClassVar[Ranges] = {"lr": Range(1e-5, 3e-2)}
    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_adam(self.beta1, self.beta2, self.eps)
        if not self.noise >= 0:
            raise ConfigError(f"noise is a standard deviation and must not be negative, got {self.noise}")

    @property
    def shaken(self) -> bool:
        """With noise of its own."""
        return self.noise > 0

    def memory(self, theta: Tensor) -> Memory:
        """m, v, and t [K, 1]."""
        return torch.zeros_like(theta), torch.zeros_like(theta), _no_steps(theta)

    def move(self, theta: Tensor, memory: Memory, slope: Tensor, n: Tensor, noise: Tensor | None, lr: Pace) -> None:
        """Down the mean of slopes, in units of their usual size."""
        first, second, steps = memory
        if noise is not None:
            slope.add_(noise, alpha=self.noise)
        rest = _moments(first, second, steps, slope, self.beta1, self.beta2)
        _adam_step(theta, first, second, rest, slope, lr, self.eps)


@dataclass(frozen=True)
class RMSprop(Chain):
    """v ← α v + (1 − α) g², θ ← θ − lr · g / (√v + eps), v = 0 at the start of each round (Hinton, 2012). As v is not
    corrected for its start, the first steps of a round are 1/√(1 − α) times as long as later ones."""

    ranges: ClassVar[Ranges] = {"lr": Range(1e-4, 3e-2)}
    lr: float = 0.01
    alpha: float = 0.99
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.alpha < 1 and self.eps > 0):
            raise ConfigError(f"alpha must lie in [0, 1) and eps above 0, got {self.alpha} and {self.eps}")

    def memory(self, theta: Tensor) -> Memory:
        """v."""
        return (torch.zeros_like(theta),)

    def move(self, theta: Tensor, memory: Memory, slope: Tensor, n: Tensor, noise: Tensor | None, lr: Pace) -> None:
        """Down the slope, in units of its usual size."""
        (second,) = memory
        second.mul_(self.alpha).addcmul_(slope, slope, value=1 - self.alpha)
        _descend(theta, slope.div_(second.sqrt().add_(self.eps)), lr)


@dataclass(frozen=True)
class SGLD(Chain):
    """θ ← θ − lr · g + √(2 lr T / n) ξ: samples of exp(−n · objective / T) for small steps (Welling & Teh, 2011).

    The objective is a mean over the client's n examples, so lr is n times the step size of the papers."""

    ranges: ClassVar[Ranges] = {"lr": Range(1e-4, 0.3)}
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_temperature(self.temperature)

    @property
    def shaken(self) -> bool:
        """By the heat."""
        return True

    def move(self, theta: Tensor, memory: Memory, slope: Tensor, n: Tensor, noise: Tensor | None, lr: Pace) -> None:
        """Downhill, and shaken."""
        assert noise is not None
        shake = (2 * lr * self.temperature / n).sqrt() * noise
        _descend(theta, slope, lr).add_(shake)


@dataclass(frozen=True)
class SGHMC(Chain):
    """v ← (1 − a) v − lr · g + √(2 a lr T / n) ξ, θ ← θ + v: Langevin dynamics with inertia, friction a (Chen et al.,
    2014). a = 1 is SGLD."""

    ranges: ClassVar[Ranges] = {"lr": Range(1e-5, 3e-2)}
    friction: float = 0.1
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_temperature(self.temperature)
        if not 0 < self.friction <= 1:
            raise ConfigError(f"friction must lie in (0, 1], got {self.friction}")

    @property
    def shaken(self) -> bool:
        """By the heat."""
        return True

    def memory(self, theta: Tensor) -> Memory:
        """v."""
        return (torch.zeros_like(theta),)

    def move(self, theta: Tensor, memory: Memory, slope: Tensor, n: Tensor, noise: Tensor | None, lr: Pace) -> None:
        """One leap."""
        (velocity,) = memory
        assert noise is not None
        shake = (2 * self.friction * lr * self.temperature / n).sqrt() * noise
        _descend(velocity.mul_(1 - self.friction), slope, lr).add_(shake)
        theta.add_(velocity)


def _check_adam(beta1: float, beta2: float, eps: float) -> None:
    for name, value in {"beta1": beta1, "beta2": beta2}.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name} must lie in [0, 1), got {value}")
    if not eps > 0:
        raise ConfigError(f"eps must be positive, got {eps}")


def _no_steps(theta: Tensor) -> Tensor:
    """t [K, 1]: clients with more batches are further on. In float32, 1 − β₂ᵗ would lose digits."""
    return torch.zeros(len(theta), 1, dtype=torch.float64, device=theta.device)


def _moments(
    first: Tensor, second: Tensor, steps: Tensor, slope: Tensor, beta1: float, beta2: float
) -> tuple[Tensor, Tensor]:
    """Running means of slopes and of their squares, in place; what they lack of 1 at step t: 1 − β₁ᵗ, 1 − β₂ᵗ."""
    steps += 1
    first.lerp_(slope, 1 - beta1)
    second.mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
    return 1 - beta1**steps, 1 - beta2**steps


def _adam_step(
    theta: Tensor, first: Tensor, second: Tensor, rest: tuple[Tensor, Tensor], slope: Tensor, lr: Pace, eps: float
) -> None:
    """θ − lr · m̂ / (√v̂ + eps), in place. That is m over (1 − β₁ᵗ)(√v̂ + eps), which is written into the slope: it has
    done its work."""
    scale, floor = (rest[0] / rest[1].sqrt()).to(theta.dtype), (rest[0] * eps).to(theta.dtype)
    below = torch.sqrt(second, out=slope).mul_(scale).add_(floor)
    if isinstance(lr, Tensor):
        theta.sub_(lr * first / below)
    else:
        theta.addcdiv_(first, below, value=-lr)


def _descend(value: Tensor, slope: Tensor, lr: Pace) -> Tensor:
    """value − lr · slope, in place."""
    return value.sub_(lr * slope) if isinstance(lr, Tensor) else value.sub_(slope, alpha=lr)


def _stiffness(prior: Gaussian | None, lr: float) -> Tensor | None:
    """max(1, lr · Λ), the entries above 1 counted; None if there are none."""
    if prior is None or prior.full:
        return None
    steep = prior.lam * lr
    guards.count("stiff prior", steep > 1)
    return steep.clamp_min(1) if bool((steep > 1).any()) else None


def _check_temperature(temperature: float) -> None:
    if not temperature >= 0:
        raise ConfigError(f"temperature must not be negative, got {temperature}")
