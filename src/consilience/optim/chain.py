"""Chain: how a client's weights move while they see its data, epoch by epoch."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from consilience.core.checks import Count, NonNegative, check_types
from consilience.core.gaussian import Gaussian
from consilience.core.ranges import Range, Ranges
from consilience.data.cohort import Cohort
from consilience.optim.schedules import Schedule
from consilience.optim.turns import Gradient, Look, Memory, Mover, StepSize, Turn
from consilience.tasks.task import Task

BatchGradient = Callable[[Tensor], tuple[Tensor, Tensor]]  # of one batch: θ [k, P] → (gradient [k, P], loss [k])


class Now(NamedTuple):
    """What a step has beside θ and its gradient: the arguments of `Chain.advance` after these."""

    memory: Memory
    prior: Gaussian | None
    stiffness: Tensor | None
    running: Tensor | None
    n: Tensor
    noise: Tensor | None
    lr: StepSize


@dataclass(frozen=True)
class Chain(ABC):
    """θ moves along g = ∇loss + ∇(prior's energy) + weight_decay · θ, one batch at a time. Subclasses define the step.

    Nearly every local objective in this field is the data loss plus the energy of a Gaussian: `prior`. The loss is a
    mean over examples, so a prior on the scale of a client's n examples enters as its n-th root. Steps longer than 1/Λ
    diverge in a stiff prior, so g is divided by step · Λ where that exceeds 1 (diagonal or scalar Λ). A `schedule`
    changes the step size during the run. `longest` limits the batches of an epoch. With `mixed`, the examples of all
    epochs are shuffled together: a round is one pass over `epochs` copies of every example, each augmented anew. A
    pass ends with a smaller batch, whose step is as long as the others and noisier; with `drop_last` it ends before,
    unless that batch is the client's only one.
    """

    ranges: ClassVar[Ranges] = {"lr": Range(1e-3, 1.0)}
    lr: NonNegative = 0.05
    epochs: Count = 1
    batch_size: Count = 20
    weight_decay: NonNegative = 0.0
    schedule: Schedule | None = None
    longest: Count | None = field(default=None, kw_only=True)
    mixed: bool = field(default=False, kw_only=True)
    drop_last: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_types(self)

    @abstractmethod
    def move(self, theta: Tensor, memory: Memory, g: Tensor, n: Tensor, noise: Tensor | None, lr: StepSize) -> None:
        """One step of θ [k, P] and of the memory, in place. `g` may be overwritten; n [k, 1] are numbers of examples;
        noise [k, P] is N(0, 1) for a `noisy` chain."""

    @property
    def passes(self) -> int:
        """The passes over batches in a round, after each of which there is an iterate."""
        return 1 if self.mixed else self.epochs

    @property
    def copies(self) -> int:
        """How often an example occurs in a pass."""
        return self.epochs // self.passes

    @property
    def noisy(self) -> bool:
        """Whether steps have noise."""
        return False

    @property
    def decay(self) -> float:
        """The weight decay that is part of the gradient; 0 in chains that decay weights in another way."""
        return self.weight_decay

    @property
    def preconditions(self) -> bool:
        """Whether steps are divided by a curvature that includes the prior's, so that stiff priors do no harm."""
        return False

    @property
    def looks_around(self) -> bool:
        """Whether a step needs gradients elsewhere than at θ."""
        return type(self).probe is not Chain.probe

    def gradient(self, task: Task, loss: Callable[..., Tensor] | None = None) -> Gradient:
        """The gradient of the loss on a batch that the steps follow, as `task.gradient` gives it."""
        return task.gradient(loss)

    def drawn(self, cohort: Cohort, k: int, size: int, tag: str) -> Tensor:
        """The noise [k, size] of one step of a `noisy` chain."""
        return cohort.noise(k, size, tag=tag)

    def probe(self, gradient: BatchGradient, theta: Tensor, now: Now) -> tuple[Tensor, Tensor]:
        """(gradient [k, P], loss [k]) of a batch that a step from θ follows: that at θ."""
        return gradient(theta)

    def probed(self, gradient: BatchGradient, theta: Tensor, *now: Any) -> tuple[Tensor, Tensor]:
        """`probe` with the parts of `Now` one by one."""
        return self.probe(gradient, theta, Now(*now))

    def memory(self, theta: Tensor) -> Memory:
        """What `move` remembers from step to step: tensors with the client axis of θ [K, P], 0 at a round's start."""
        return ()

    def step_size(self, cohort: Cohort, epoch: int, step: int, k: int) -> StepSize:
        """The step size of the first k clients at a step of the round, by the schedule."""
        if self.schedule is None:
            return self.lr
        by_steps = self.schedule.unit == "steps"  # else n is the same for all, and the device is not asked
        batches = self.batches(cohort.n[:k, 0]) if by_steps else torch.ones(1, dtype=torch.float64)
        factor = self.schedule.factor(self.schedule.count(cohort.round, epoch, step, self.passes, batches))
        own = self.schedule.for_clients(cohort.ids[:k])
        if own is None and not by_steps:
            return self.lr * float(factor)
        factor = factor if own is None else factor.to(cohort.device) * own.to(cohort.device)
        return (self.lr * factor).to(cohort.n.dtype).unsqueeze(1)

    def batches(self, n: Tensor) -> Tensor:
        """The number of steps in a pass for clients with n examples."""
        batches = self.copies * n.double() / self.batch_size
        taken = batches.ceil()
        if self.drop_last:
            taken = taken.minimum(batches.floor().clamp_min(1))
        return taken.clamp_max(math.inf if self.longest is None else self.longest)

    def steps(self, cohort: Cohort) -> Tensor:
        """The number of steps in a round, [K, 1]."""
        return self.passes * self.batches(cohort.n).to(cohort.n)

    def time(self, cohort: Cohort, pace: Tensor | None = None) -> Tensor:
        """The sum of the step sizes of a round, [K, 1]; with a task's `pace`, for every parameter [K, P]."""
        if pace is not None:
            return self.time(cohort) * pace
        if self.schedule is None:
            return self.lr * self.steps(cohort)
        total, batches = torch.zeros_like(cohort.n), self.batches(cohort.n)
        by_steps = self.schedule.unit == "steps"
        for epoch in range(self.passes):
            for step in range(int(batches.max()) if by_steps else 1):
                size = self.step_size(cohort, epoch, step, len(cohort))
                total += size * ((step < batches) if by_steps else batches).to(cohort.n)
        return total

    def __call__(
        self,
        task: Task,
        theta: Tensor,
        cohort: Cohort,
        *own: Any,
        loss: Callable[..., Tensor] | None = None,
        prior: Gaussian | None = None,
        shared: tuple[Any, ...] = (),
        pace: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """The parameters [K, P] after the last epoch, from θ [P] or [K, P], at the pace of the task, times `pace` [P].

        `loss(task, θ, batch, *own, *shared)` of one client is the task's own unless it is given. `first` is the number
        of the first epoch: a client that trains twice in a round sees other batches the second time."""
        if task.pace is not None:
            pace = task.pace if pace is None else task.pace * pace
        for last in self.iterates(
            self.gradient(task, loss), theta, cohort, *own, pace=pace, running=task.running, prior=prior, shared=shared,
            first=first,
        ):  # fmt: skip
            theta = last
        return theta

    def iterates(
        self,
        gradient: Gradient | tuple[Turn, ...],
        theta: Tensor,
        cohort: Cohort,
        *own: Any,
        pace: Tensor | None = None,
        running: Tensor | None = None,
        prior: Gaussian | None = None,
        shared: tuple[Any, ...] = (),
        look: Look | None = None,
        first: int = 0,
        memory: Memory | None = None,
    ) -> Iterator[Tensor]:
        """The parameters [K, P] of every client after every pass, from θ [P] or [K, P]. The same tensor is yielded
        each time: copy what must last.

        `own` and `prior` are cut to the clients that still have a batch. `pace` [P] multiplies the step sizes. Where
        `running` [P] is not 0, θ moves by that share of the loss's gradient and by nothing else. `look` is called after
        every step. `first` is as in a call. A given `memory` is continued, in place. Several `Turn`s in place of a
        gradient step one after the other on every batch; the loss is that of the first."""
        # A stack of the same vector is copied row by row, twice as fast on a GPU as numbers that are spread out.
        theta = torch.stack([theta] * len(cohort)) if theta.dim() == 1 else theta.expand(len(cohort), -1).clone()
        size, pace = theta.shape[1], None if pace is None else pace[: theta.shape[1]]
        turns = gradient if isinstance(gradient, tuple) else (Turn(gradient, 0, size),)
        movers = [Mover(self, turn, theta, memory=memory, prior=prior, pace=pace, running=running) for turn in turns]
        loss, seen = torch.zeros_like(cohort.n[:, 0]), torch.zeros_like(cohort.n[:, 0])
        taken = torch.zeros_like(cohort.n)
        for epoch in range(self.passes):
            loss.zero_()
            seen.zero_()
            batches = cohort.epoch(
                first + epoch, self.batch_size, copies=self.copies, longest=self.longest, drop_last=self.drop_last
            )
            for step, (k, batch) in enumerate(batches):
                now = theta[:k]
                tag = f"chain {first + epoch} {step}"
                noise = self.drawn(cohort, k, size, tag) if self.noisy else None
                lr = self.step_size(cohort, epoch, step, k)
                moves = [mover for mover in movers if step % mover.turn.every == 0]
                values = [mover(now, batch, own, shared, cohort.n[:k], noise, lr) for mover in moves]
                examples = batch.w.sum(1)
                loss[:k].addcmul_(values[0], examples)
                seen[:k].add_(examples)
                if look is not None:
                    taken[:k] += 1
                    look(taken[:k], now)
            cohort.note(loss=loss / seen.clamp_min(1))
            yield theta

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
        """The step along the whole gradient, in place. It is elementwise: compiled, it is one pass over memory."""
        averages = None if running is None else theta - running * g
        if prior is not None:
            g = prior.add_energy_gradient(g, theta)
        elif self.decay:
            g = torch.add(g, theta, alpha=self.decay)
        if stiffness is not None:
            g = g / stiffness
        self.move(theta, memory, g, n, noise, lr)
        if averages is not None and running is not None:
            theta.copy_(torch.where(running != 0, averages, theta))


def descend(value: Tensor, g: Tensor, lr: StepSize) -> Tensor:
    """value − lr · g, in place."""
    return value.sub_(lr * g) if isinstance(lr, Tensor) else value.sub_(g, alpha=lr)
