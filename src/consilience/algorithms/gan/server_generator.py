"""ServerGenerator: the server trains the generator, clients train discriminators."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.gan.players import ADAM, adversarial
from consilience.core import ConfigError, Count, keys
from consilience.data import Batch, Cohort
from consilience.optim import Chain
from consilience.optim.turns import Memory
from consilience.tasks import Adversarial, Task

SHORT = replace(ADAM, longest=6)  # the papers' six steps a round


@algorithm
class ServerGenerator(Algorithm):
    """`train` is the clients' optimiser of discriminators, `generator` the server's optimiser of the generator, which
    takes `steps` steps a round. With `single` the task has one generator and one discriminator."""

    train: Chain = SHORT
    generator: Chain = ADAM
    steps: Count = 6
    single: bool = False

    def __post_init__(self) -> None:
        unused = {"epochs": 1, "longest": None, "mixed": False, "weight_decay": 0, "schedule": None}
        unused |= {"noise": 0, "temperature": 0}
        for name, usual in unused.items():
            if (value := getattr(self.generator, name, usual)) != usual:
                raise ConfigError(f"generator.{name} has no effect at the server: omit it, got {value}")
        if self.generator.looks_around:
            kind = type(self.generator).__name__
            raise ConfigError(
                f"generator needs gradients at the weights, which {kind} does not take: choose Adam or SGD"
            )

    def adapt(self, task: Task, seed: int) -> Task:
        return adversarial(task, self.name, self.single)

    def discriminate(self, task: Adversarial, generator: Tensor, before: Tensor, cohort: Cohort) -> Tensor:
        """Discriminators [K, D] after local training from `before` [D] or [K, D] against a fixed generator [G]."""
        *_, theta = self.train.iterates(
            self.train.gradient(task, discriminator_loss), before, cohort, shared=(generator,)
        )
        return theta

    def generate(
        self,
        loss: Callable[..., Tensor],
        task: Adversarial,
        theta: Tensor,
        memory: Memory,
        key: Tensor,
        shared: tuple[Any, ...],
    ) -> Iterator[Tensor]:
        """θ [1, P] after each of the server's steps on `loss(task, θ, batch, *shared)`; θ and the memory are changed in
        place. The batch has weights and a key, but no examples."""
        gradient, ones = task.gradient(loss), torch.ones_like(theta[:, :1])
        weight = ones.expand(1, self.generator.batch_size)
        noise = torch.zeros_like(theta) if self.generator.noisy else None
        for step in range(self.steps):
            batch = Batch(weight, weight, weight, keys.fold(key, f"step {step}").view(1))
            g, _ = gradient(theta, batch, shared=shared)
            self.generator.move(theta, memory, g, ones, noise, self.generator.lr)
            yield theta


def discriminator_loss(task: Adversarial, theta: Tensor, batch: Batch, generator: Tensor) -> Tensor:
    """L_D of one client's discriminator."""
    parts = task.split(torch.cat([generator, theta]))
    return task.discriminator_loss_one(parts, task.made_one(generator, batch), batch)
