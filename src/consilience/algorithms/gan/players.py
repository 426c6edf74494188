"""Players: clients that train generators and discriminators on their own examples, and a server that averages both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.algorithms.shared.averaging import Server as Averaged
from consilience.algorithms.shared.averaging import continued
from consilience.core.errors import ConfigError, TaskError
from consilience.core.gaussian import Gaussian
from consilience.core.records import Point, Weighted
from consilience.data.batch import Batch
from consilience.data.cohort import Cohort, Info
from consilience.optim import Adam, Chain
from consilience.optim.chain import Look
from consilience.server.optimizers import ServerOptimizer
from consilience.tasks.adversarial import HEADS, Adversarial
from consilience.tasks.task import Task

PAST = "past"  # the part with the running mean of the discriminators' own layers
EVERY = 10  # steps after which it is taken
ADAM = Adam(lr=3e-4, beta1=0.5, batch_size=128)
NOISY = Adam(lr=3e-4, beta1=0.5, batch_size=128, noise=6e-4)  # as codes of Bayesian GANs sample


def adversarial(task: Task, method: str, single: bool = False) -> Adversarial:
    """The task, if it is one that GANs learn; with one generator and one discriminator, if only they are wanted."""
    if not isinstance(task, Adversarial):
        raise TaskError(f"{method} learns an Adversarial task, a generator and a discriminator, and not {task.kind}")
    return task.with_samples(1, 1) if single and task.generators * task.discriminators > 1 else task


class Players(Algorithm):
    """Clients play from the global networks w. Kinds differ in what is believed of the weights before, and in whom
    generators play against.

    After every local epoch w_k ← (1 − ρ) w_k + ρ w with ρ = `interpolate`. With `history` generators also play against
    the discriminators of the past (He et al., 2019): the present trunk with the running mean of the last layers, taken
    every ten of a client's steps; it is averaged like the networks. With `single` there is one generator and one
    discriminator, however many samples the task has.
    """

    train: Chain
    server: ServerOptimizer
    interpolate: float
    history: bool
    single: bool

    def __post_init__(self) -> None:
        if not 0 <= self.interpolate < 1:
            raise ConfigError(f"interpolate must lie in [0, 1), got {self.interpolate}")

    def adapt(self, task: Task, seed: int) -> Task:
        """Append what is remembered of the past, last."""
        players = adversarial(task, self.name, self.single)
        return players.extend(**{PAST: players.part(HEADS)}) if self.history else players

    def game(self, task: Adversarial, theta: Tensor, batch: Batch, past: Tensor) -> Tensor:
        """One client's game; without a history the past is empty."""
        return task.game_one(theta, batch, past if self.history else None)

    def play(
        self,
        loss: Callable[..., Tensor],
        task: Adversarial,
        w: Tensor,
        cohort: Cohort,
        *own: Any,
        prior: Gaussian | None = None,
        look: Look | None = None,
    ) -> Tensor:
        """All clients' weights [K, P] after a round from w [P] with `loss(task, θ, batch, past, *own)`."""
        trained = task.slice(PAST).start if self.history else len(w)
        theta, past = w[:trained], w[trained:].repeat(len(cohort), 1)
        before = (cohort.round - 1) * self.train.steps(cohort)

        def after(taken: Tensor, now: Tensor) -> None:
            if self.history:
                k = len(now)
                number = before[:k] + taken  # in all rounds
                share = torch.where(number % EVERY == 0, EVERY / number, 0)
                past[:k] += share * (now[:, task.slice(HEADS)] - past[:k])
            if look is not None:
                look(taken, now)

        found = theta
        gradient = task.gradient(loss)
        for found in self.train.iterates(gradient, theta, cohort, past, *own, pace=task.pace, prior=prior, look=after):
            if self.interpolate:
                found.lerp_(theta, self.interpolate)
        return torch.cat([found, past], 1)


class AveragedPlayers(Players):
    """w ← w + Σ p_k (w_k − w), p_k = n_k / Σ n, for generators and discriminators alike."""

    def start(self, task: Adversarial, info: Info) -> Averaged:
        """The modules' own weights."""
        return continued(info, self.server)

    def message(self, server: Averaged, ids: object) -> Point:
        """The global networks."""
        return server.model

    def prior(self, w: Tensor, cohort: Cohort) -> Gaussian | None:
        """What is believed of the weights before, to the power of 1/n."""
        return None

    def local(self, task: Adversarial, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        """Play from w; send n_k (w_k − w)."""
        w = message.theta
        played = self.play(self.game, task, w, cohort, prior=self.prior(w, cohort))
        return Weighted.of(Point(played - w), cohort.n), None

    def fuse(self, server: Averaged, update: Weighted) -> Averaged:
        """A server step along the mean change."""
        return Averaged(*self.server.step(server.model, update.mean, server.memory))

    def posterior(self, server: Averaged) -> Point:
        """The players."""
        return server.model
