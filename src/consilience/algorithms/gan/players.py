"""Players: clients train generators and discriminators on their own examples, and the server averages both."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.averaging import Averaging, change
from consilience.core import ConfigError, Count, Fraction, Gaussian, TaskError
from consilience.data import Batch, Cohort
from consilience.optim import Adam, Chain
from consilience.optim.turns import Gradient, Look, Turn
from consilience.tasks.adversarial import AVERAGE, Adversarial
from consilience.tasks.layout import MAIN
from consilience.tasks.sampled import HEADS
from consilience.tasks.task import Task

PAST = "past"  # the part with the running mean of the discriminators' last layers
EVERY = 10  # the mean takes the last layers after every tenth step
NOISE = 0.03 * 0.02**0.5  # in codes of Bayesian GANs: 0.03 times a number of variance 0.02, added to the gradient
ADAM = Adam(lr=5e-4, beta1=0.5, beta2=0.9, batch_size=64)
NOISY = replace(ADAM, noise=NOISE)


def adversarial(task: Task, method: str, single: bool = False) -> Adversarial:
    """The task as an `Adversarial` one, with one generator and one discriminator if `single`; else an error."""
    if not isinstance(task, Adversarial):
        raise TaskError(f"{method} needs an Adversarial task, a generator and a discriminator; got {task.kind}")
    return task.with_samples(1, 1) if single and task.generators * task.discriminators > 1 else task


@algorithm
class Players(Averaging):
    """w ← w + Σ p_k (w_k − w), p_k = n_k / Σ n, for generators and discriminators; w_k by playing from w.

    Discriminators take a step on every batch. Generators take one after the first of every `critic_steps` batches of an
    epoch, on new noise, with `generated` examples for each of the batch; with `critic_steps` None both take their steps
    at once, on the same generated examples. With `average` β above 0, samples for evaluation come from a moving average
    of the generators, a ← β_t a + (1 − β_t) θ_G after each of their steps, which is averaged like the networks;
    β_t = min(β, (1 + t) / (10 + t)) forgets the initial weights.

    After every local epoch w_k ← (1 − ρ) w_k + ρ w, with ρ = `interpolate`. With `history` generators also play against
    past discriminators (He et al., 2019): the present trunk with the running mean of the last layers, which is taken
    after every tenth of a client's steps and averaged like the networks. With `single` the task has one generator and
    one discriminator. Subclasses may set `history` and `single`, as fields or not, and override `weight_prior`."""

    train: Chain = ADAM
    critic_steps: Count | None = 5
    generated: Count = 1
    average: Fraction = 0.0
    interpolate: Fraction = 0.0
    history = False
    single = False

    def __post_init__(self) -> None:
        if self.critic_steps is not None and self.train.looks_around:
            raise ConfigError(
                "players that take turns need gradients at the weights, which "
                f"{type(self.train).__name__} does not take: choose Adam or SGD, or critic_steps=None"
            )

    def adapt(self, task: Task, seed: int) -> Task:
        """The task with the past last layers and the average generator as its last parts, if there are any."""
        players = adversarial(task, self.name, self.single)
        if self.history:
            players = players.extend(**{PAST: players.part(HEADS)})
        return players.extend(**{AVERAGE: players.part(MAIN)}) if self.average else players

    def weight_prior(self, w: Tensor, cohort: Cohort) -> Gaussian | None:
        """The prior of the weights to the power 1/n; None without one."""
        return None

    def local(self, task: Adversarial, message: Any, state: Any, cohort: Cohort) -> tuple[Any, Any]:
        w = message.theta
        return change(self.play(task, w, cohort, prior=self.weight_prior(w, cohort)), w, cohort.n), None

    def game(self, task: Adversarial, theta: Tensor, batch: Batch, past: Tensor) -> Tensor:
        """One client's game, both players at once. `past` are the past last layers; empty without a history."""
        return task.game_one(theta, batch, past if self.history else None)

    def discriminators_turn(self, task: Adversarial, theta: Tensor, batch: Batch, past: Tensor) -> Tensor:
        """The discriminators' loss of one client."""
        return task.discriminator_turn_one(theta, batch)

    def generators_turn(self, task: Adversarial, theta: Tensor, batch: Batch, past: Tensor) -> Tensor:
        """The generators' loss of one client."""
        return task.generator_turn_one(theta, batch, past if self.history else None, self.generated)

    def play(
        self,
        task: Adversarial,
        w: Tensor,
        cohort: Cohort,
        *own: Any,
        energy: Callable[..., Tensor] | None = None,
        prior: Gaussian | None = None,
        look: Look | None = None,
    ) -> Tensor:
        """All clients' weights [K, P] after a round from w [P]. `energy(task, θ, batch, *own)` is added to the losses,
        and `prior` to their gradients."""
        kept = [part for part in (PAST, AVERAGE) if part in task.layout.parts]
        trained = task.slice(kept[0]).start if kept else len(w)
        theta = w[:trained]
        past, average = (
            w[task.slice(part)].repeat(len(cohort), 1) if part in kept else w.new_zeros(len(cohort), 0)
            for part in (PAST, AVERAGE)
        )
        before = (cohort.round - 1) * self.train.steps(cohort)

        def after(taken: Tensor, now: Tensor) -> None:
            if self.history:
                k = len(now)
                number = before[:k] + taken  # in all rounds
                share = torch.where(number % EVERY == 0, EVERY / number, 0)
                past[:k] += share * (now[:, task.slice(HEADS)] - past[:k])
            if look is not None:
                look(taken, now)

        follow = _follow(average, self._generators_steps(cohort), self.average, task.slice()) if self.average else None
        moves = self._turns(task, trained, energy, follow)
        found = theta
        for found in self.train.iterates(
            moves, theta, cohort, past, *own, pace=task.pace, running=task.running, prior=prior, look=after
        ):
            if self.interpolate:
                found.lerp_(theta, self.interpolate)
        return torch.cat([found, past, average], 1)

    def _turns(
        self, task: Adversarial, trained: int, energy: Callable[..., Tensor] | None, follow: Look | None
    ) -> tuple[Turn, ...]:
        def gradient(game: Callable[..., Tensor]) -> Gradient:
            return self.train.gradient(task, game if energy is None else Sum(game, energy))

        if self.critic_steps is None:
            return (Turn(gradient(self.game), 0, trained, look=follow),)
        makers = task.slice().stop
        return (
            Turn(gradient(self.discriminators_turn), makers, trained),
            Turn(gradient(self.generators_turn), 0, makers, self.critic_steps, follow),
        )

    def _generators_steps(self, cohort: Cohort) -> Tensor:
        """The number of the generators' steps in earlier rounds, [K, 1]."""
        batches = self.train.batches(cohort.n) / (self.critic_steps or 1)
        return ((cohort.round - 1) * self.train.epochs * batches.ceil()).to(cohort.n)


@dataclass(frozen=True)
class Sum:
    """A game and an energy of the weights as one loss. The value is the game's, the gradient that of both."""

    game: Callable[..., Tensor]
    energy: Callable[..., Tensor]

    def __call__(self, task: Adversarial, theta: Tensor, batch: Batch, past: Tensor, *own: Tensor) -> Tensor:
        energy = self.energy(task, theta, batch, *own)
        return self.game(task, theta, batch, past) + (energy - energy.detach())


def _follow(average: Tensor, before: Tensor, decay: float, makers: slice) -> Look:
    """Moves the average generators [K, G] after each step of the generators, which took `before` [K, 1] earlier."""

    def follow(taken: Tensor, now: Tensor) -> None:
        k = len(now)
        number = before[:k] + taken
        share = 1 - ((1 + number) / (10 + number)).clamp_max(decay)
        average[:k] += share * (now[:, makers] - average[:k])

    return follow
