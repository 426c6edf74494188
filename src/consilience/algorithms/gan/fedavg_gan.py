"""FedAvg-GAN: the server trains the generator, clients train the discriminator (Augenstein et al., 2020)."""

from dataclasses import replace

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.gan.server_generator import ServerGenerator
from consilience.algorithms.shared.averaging import change
from consilience.core.records import Point, Weighted, record
from consilience.data import Batch, Cohort, Info
from consilience.optim.turns import Memory
from consilience.tasks.adversarial import Adversarial
from consilience.tasks.layout import MAIN


@record
class Server:
    """The generator [G] with its optimiser's memory, and the discriminator [D]."""

    generator: Tensor
    discriminator: Tensor
    memory: Memory


@algorithm
class FedAvgGAN(ServerGenerator):
    """θ_D ← θ_D + Σ p_k (θ_D,k − θ_D), where clients train against a fixed generator; then the server takes `steps`
    steps on L_G(θ_G; θ_D), without any data. `Private` around it is DP-FedAvg-GAN."""

    @property
    def name(self) -> str:
        return "FedAvg-GAN"

    def start(self, task: Adversarial, info: Info) -> Server:
        generator, discriminator = (part.clone() for part in _players(task, info.initial))
        return Server(generator, discriminator, self.generator.memory(generator.unsqueeze(0)))

    def message(self, server: Server, ids: object) -> Point:
        return Point(torch.cat([server.generator, server.discriminator]))

    def local(self, task: Adversarial, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        generator, before = _players(task, message.theta)
        return change(self.discriminate(task, generator, before, cohort), before, cohort.n), None

    def fuse(self, server: Server, update: Weighted) -> Server:
        return replace(server, discriminator=server.discriminator + update.mean.theta)

    def advance(self, task: Adversarial, server: Server, key: Tensor) -> Server:
        theta, memory = server.generator.unsqueeze(0).clone(), tuple(part.clone() for part in server.memory)
        for _ in self.generate(generator_loss, task, theta, memory, key, (server.discriminator,)):
            pass
        return replace(server, generator=theta[0], memory=memory)

    def posterior(self, server: Server) -> Point:
        return self.message(server, None)


def generator_loss(task: Adversarial, theta: Tensor, batch: Batch, discriminator: Tensor) -> Tensor:
    """L_G of one generator."""
    parts = task.split(torch.cat([theta, discriminator]))
    return task.generator_loss_one(parts, task.made_one(parts[MAIN], batch), batch)


def _players(task: Adversarial, theta: Tensor) -> tuple[Tensor, Tensor]:
    """The generator [G] and the discriminator [D]."""
    size = task.slice(MAIN).stop
    return theta[:size], theta[size:]
