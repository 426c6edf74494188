"""F2A: the generator plays against a soft maximum of all clients' discriminators (Yonetani et al., 2019)."""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.gan.server_generator import ServerGenerator
from consilience.core import NonNegative, Point, record
from consilience.data import Batch, Cohort, Info
from consilience.optim.turns import Memory
from consilience.tasks.adversarial import Adversarial
from consilience.tasks.layout import MAIN
from consilience.tasks.sampled import HEADS, TRUNK


@record
class Server:
    """The generator [G] and λ [1] with their optimiser's memory, and the round's discriminators [K, D]."""

    generator: Tensor
    sharpness: Tensor
    discriminators: Tensor
    memory: Memory


@algorithm
class F2A(ServerGenerator):
    """d(x) = Σ_k w_k d_k(x), w = softmax_k(λ d_k(x)): λ = 0 is the mean, a large λ the greatest score. An example
    needs to look real to one client's discriminator only, so data that one client has are not unlearned.

    Clients keep their own discriminators. The server trains the generator and λ ≥ 0 on L_G(θ_G; d) + `beta` λ²."""

    additive: ClassVar[bool] = False
    beta: NonNegative = 0.1

    def start(self, task: Adversarial, info: Info) -> Server:
        size, sharpness = task.slice(MAIN).stop, info.initial.new_ones(1)
        generator, discriminator = info.initial[:size].clone(), info.initial[size:].clone()
        memory = self.generator.memory(torch.cat([generator, sharpness]).unsqueeze(0))
        return Server(generator, sharpness, discriminator.unsqueeze(0), memory)

    def client(self, task: Adversarial, info: Info, n: Tensor) -> Point:
        return Point(info.initial[task.slice(MAIN).stop :].repeat(len(n), 1))

    def message(self, server: Server, ids: object) -> Point:
        return Point(server.generator)

    def local(self, task: Adversarial, message: Point, state: Point, cohort: Cohort) -> tuple[Point, Point]:
        own = Point(self.discriminate(task, message.theta, state.theta, cohort))
        return own, own

    def follow(self, state: Point, update: Point) -> Point:
        return update

    def fuse(self, server: Server, update: Point) -> Server:
        return replace(server, discriminators=update.theta)

    def advance(self, task: Adversarial, server: Server, key: Tensor) -> Server:
        theta = torch.cat([server.generator, server.sharpness]).unsqueeze(0)
        memory = tuple(part.clone() for part in server.memory)
        for now in self.generate(self.generator_loss, task, theta, memory, key, (server.discriminators,)):
            now[:, -1].clamp_min_(0)
        return Server(theta[0, :-1], theta[0, -1:], server.discriminators, memory)

    def generator_loss(self, task: Adversarial, theta: Tensor, batch: Batch, discriminators: Tensor) -> Tensor:
        """L_G of one generator against all discriminators, and the penalty on λ."""
        generator, sharpness = theta[:-1], theta[-1]
        made = task.made_one(generator, batch)
        sizes = [task.slice(part).stop - task.slice(part).start for part in (TRUNK, HEADS)]
        players = [dict(zip((TRUNK, HEADS), one.split_with_sizes(sizes), strict=True)) for one in discriminators]
        each = torch.stack([task.score_one(player, made, batch.key) for player in players])
        score = ((sharpness * each).softmax(0) * each).sum(0)
        return batch.mean(task.objective.generator(score)) + self.beta * sharpness.square()

    def posterior(self, server: Server) -> Point:
        """The generator and the mean of the round's discriminators."""
        return Point(torch.cat([server.generator, server.discriminators.mean(0)]))

    def facts(self, server: Server) -> dict[str, float]:
        return {"sharpness": float(server.sharpness)}
