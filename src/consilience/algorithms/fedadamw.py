"""FedAdamW: AdamW at the clients, whose second moments outlive a round (Liu et al., 2025)."""

from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared import averaging
from consilience.algorithms.shared.averaging import Averaging
from consilience.algorithms.shared.groups import groups
from consilience.core import ConfigError, NonNegative, Point, Range, Ranges, Weighted, record
from consilience.data.cohort import Cohort, Info
from consilience.optim import AdamW
from consilience.tasks.task import Task


@record
class Server(averaging.Server):
    """The weights, the mean second moment of every layer v [G], the last mean change for each unit of step size d [P],
    and the number of local steps so far t [1]."""

    v: Tensor
    d: Tensor
    steps: Tensor


@record
class Message:
    """w, v, d and t."""

    w: Tensor
    v: Tensor
    d: Tensor
    steps: Tensor


@record
class Change:
    """The client's change of w [K, P], its v by layer [K, G], and the sum and number of its steps [K, 1]."""

    theta: Tensor
    v: Tensor
    time: Tensor
    steps: Tensor


@algorithm
class FedAdamW(Averaging):
    """Clients take steps θ ← θ − lr (m̂ / (√v̂ + eps) − α d + weight_decay · θ) of `AdamW`, from w and m = 0. v starts at
    the mean v of the last round's clients, one number for each layer, and d is the last round's mean change of w for
    each unit of step size. w ← w + optimiser(mean of θ − w), uniform over the round's clients.

    `alpha` is α. v̂ is corrected for all steps since the start of the run, m̂ for those of the round. In the first round
    this is FedAvg with AdamW. The paper divides attention layers into more blocks."""

    ranges: ClassVar[Ranges] = {"alpha": Range(0.05, 1.0)}
    train: AdamW = AdamW(lr=0.01)
    alpha: NonNegative = 0.5

    def __post_init__(self) -> None:
        if self.train.schedule is not None and self.train.schedule.unit != "rounds":
            raise ConfigError(f"{self.name} takes α d at one step size a round: give the schedule the unit 'rounds'")

    def start(self, task: Task, info: Info) -> Server:
        base, w = super().start(task, info), info.initial
        _, names = groups(task, "layers")
        return Server(base.model, base.memory, w.new_zeros(len(names)), torch.zeros_like(w), w.new_zeros(1))

    def message(self, server: Server, ids: Tensor) -> Message:
        return Message(server.model.theta, server.v, server.d, server.steps)

    def local(self, task: Task, message: Message, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        w, one = message.w, torch.ones_like(cohort.n)
        at, names = groups(task, "layers")
        at = at.expand(len(w))
        push = self._push(task, message, cohort)
        momentum, _, steps = self.train.memory(w.expand(len(cohort), -1))
        v = message.v[at].expand(len(cohort), -1).clone()

        def along(taken: Tensor, now: Tensor) -> None:
            now += push[: len(now)]

        *_, trained = self.train.iterates(
            self.train.gradient(task), w, cohort, pace=task.pace, running=task.running, look=along,
            memory=(momentum, v, torch.cat([steps, steps + message.steps.to(steps)], 1)),
        )  # fmt: skip
        sums = v.new_zeros(len(v), len(names)).index_add_(1, at, v)
        layers = sums / at.bincount(minlength=len(names))
        change = Change(trained - w, layers, self.train.time(cohort), self.train.steps(cohort))
        return Weighted.of(change, one), None

    def _push(self, task: Task, message: Message, cohort: Cohort) -> Tensor:
        """lr α d for each client [K, P]; running averages of BatchNorm layers have none."""
        push = self.alpha * message.d.expand(len(cohort), -1) * self.train.step_size(cohort, 0, 0, len(cohort))
        push = push if task.pace is None else push * task.pace
        return push if task.running is None else push * (task.running == 0)

    def fuse(self, server: Server, update: Weighted) -> Server:
        mean = update.mean
        model, memory = self.server.step(server.model, Point(mean.theta), server.memory)
        d = torch.where(mean.time > 0, mean.theta / mean.time, 0)
        return Server(model, memory, mean.v, d, server.steps + mean.steps)
