"""Players: clients train generators and discriminators on their own examples, and the server averages both."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.averaging import Averaging, change
from consilience.core import Fraction, Gaussian, TaskError
from consilience.data import Batch, Cohort
from consilience.optim import Adam, Chain
from consilience.optim.chain import Look
from consilience.tasks.adversarial import HEADS, Adversarial
from consilience.tasks.task import Task

PAST = "past"  # the part with the running mean of the discriminators' last layers
EVERY = 10  # the mean takes the last layers after every tenth step
ADAM = Adam(lr=3e-4, beta1=0.5, batch_size=128)
NOISY = Adam(lr=3e-4, beta1=0.5, batch_size=128, noise=6e-4)  # the noise in codes of Bayesian GANs


def adversarial(task: Task, method: str, single: bool = False) -> Adversarial:
    """The task as an `Adversarial` one, with one generator and one discriminator if `single`; else an error."""
    if not isinstance(task, Adversarial):
        raise TaskError(f"{method} needs an Adversarial task, a generator and a discriminator; got {task.kind}")
    return task.with_samples(1, 1) if single and task.generators * task.discriminators > 1 else task


@algorithm
class Players(Averaging):
    """w ← w + Σ p_k (w_k − w), p_k = n_k / Σ n, for generators and discriminators; w_k by playing from w.

    After every local epoch w_k ← (1 − ρ) w_k + ρ w, with ρ = `interpolate`. With `history` generators also play against
    past discriminators (He et al., 2019): the present trunk with the running mean of the last layers, which is taken
    after every tenth of a client's steps and averaged like the networks. With `single` the task has one generator and
    one discriminator. Subclasses may set `history` and `single`, as fields or not, and override `weight_prior`."""

    train: Chain = ADAM
    interpolate: Fraction = 0.0
    history = False
    single = False

    def adapt(self, task: Task, seed: int) -> Task:
        """The task with the past last layers as its last part, if there is a history."""
        players = adversarial(task, self.name, self.single)
        return players.extend(**{PAST: players.part(HEADS)}) if self.history else players

    def weight_prior(self, w: Tensor, cohort: Cohort) -> Gaussian | None:
        """The prior of the weights to the power 1/n; None without one."""
        return None

    def local(self, task: Adversarial, message: Any, state: Any, cohort: Cohort) -> tuple[Any, Any]:
        w = message.theta
        return change(self.play(self.game, task, w, cohort, prior=self.weight_prior(w, cohort)), w, cohort.n), None

    def game(self, task: Adversarial, theta: Tensor, batch: Batch, past: Tensor) -> Tensor:
        """One client's game. `past` are the past last layers; empty without a history."""
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

        found, gradient = theta, self.train.gradient(task, loss)
        for found in self.train.iterates(
            gradient, theta, cohort, past, *own, pace=task.pace, running=task.running, prior=prior, look=after
        ):
            if self.interpolate:
                found.lerp_(theta, self.interpolate)
        return torch.cat([found, past], 1)
