"""F2A: the generator plays against whichever discriminator forgives it most (Yonetani et al., 2019)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.gan.fedavg_gan import MAKER, SHORT, blank, check_maker, take, trained
from consilience.algorithms.gan.players import adversarial
from consilience.core import keys
from consilience.core.errors import ConfigError
from consilience.core.records import Point, record
from consilience.data.batch import Batch
from consilience.data.cohort import Cohort, Info
from consilience.optim import Chain
from consilience.optim.chain import Memory
from consilience.tasks.adversarial import HEADS, TRUNK, Adversarial
from consilience.tasks.task import MAIN, Task


@record
class Jury:
    """The generator [G] and λ [1] with their optimiser's memory, and the round's discriminators [K, D]."""

    generator: Tensor
    sharpness: Tensor
    discriminators: Tensor
    memory: Memory


@algorithm
class F2A(Algorithm):
    """d(x) = Σ_k w_k d_k(x), w = softmax_k(λ d_k(x)): what looks real to one client's discriminator is good enough, so
    that no client's data is unlearned for being unknown to others. Clients keep discriminators of their own; the server
    trains the generator and λ ≥ 0 on L_G(θ_G; d) + `beta` λ². λ = 0 is the mean, a large one the greatest."""

    additive: ClassVar[bool] = False
    train: Chain = SHORT
    maker: Chain = MAKER
    steps: int = 6
    beta: float = 0.1
    single: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.beta >= 0:
            raise ConfigError(f"steps must be at least 1 and beta not negative, got {self.steps} and {self.beta}")
        check_maker(self.maker)

    def adapt(self, task: Task, seed: int) -> Task:
        """As it is, or with one player each."""
        return adversarial(task, self.name, self.single)

    def start(self, task: Adversarial, info: Info) -> Jury:
        """The modules' own weights, and λ = 1."""
        made = task.slice(MAIN).stop
        generator, sharpness = info.initial[:made].clone(), info.initial.new_ones(1)
        memory = self.maker.memory(torch.cat([generator, sharpness]).unsqueeze(0))
        return Jury(generator, sharpness, info.initial[made:].unsqueeze(0).clone(), memory)

    def client(self, task: Adversarial, info: Info, n: Tensor) -> Point:
        """Every client begins with the module's own discriminator."""
        return Point(info.initial[task.slice(MAIN).stop :].repeat(len(n), 1))

    def message(self, server: Jury, ids: object) -> Point:
        """The generator."""
        return Point(server.generator)

    def local(self, task: Adversarial, message: Point, state: Point, cohort: Cohort) -> tuple[Point, Point]:
        """Go on training the own discriminator, and show it."""
        mine = Point(trained(self.train, task, message.theta, state.theta, cohort))
        return mine, mine

    def follow(self, state: Point, update: Point) -> Point:
        """It was shown."""
        return update

    def fuse(self, server: Jury, update: Point) -> Jury:
        """This round's discriminators."""
        return Jury(server.generator, server.sharpness, update.theta, server.memory)

    def advance(self, task: Adversarial, server: Jury, key: Tensor) -> Jury:
        """Train the generator and λ."""
        theta = torch.cat([server.generator, server.sharpness]).unsqueeze(0)
        memory = tuple(part.clone() for part in server.memory)
        gradient = task.gradient(self.against)
        for step in range(self.steps):
            batch = blank(task, keys.fold(key, f"step {step}"), self.maker.batch_size)
            slope, _ = gradient(theta, batch, shared=(server.discriminators,))
            take(self.maker, theta, memory, slope)
            theta[:, -1].clamp_min_(0)
        return Jury(theta[0, :-1], theta[0, -1:], server.discriminators, memory)

    def against(self, task: Adversarial, theta: Tensor, batch: Batch, discriminators: Tensor) -> Tensor:
        """L_G of one generator against all discriminators, and the penalty on λ."""
        generator, sharpness = theta[:-1], theta[-1]
        made = task.call_one(MAIN, generator, task.latents(batch.key, len(batch.w)), key=batch.key)
        sizes = [task.slice(part).stop - task.slice(part).start for part in (TRUNK, HEADS)]
        verdicts = [
            task.score_one(dict(zip((TRUNK, HEADS), one.split_with_sizes(sizes), strict=True)), made, batch.key)
            for one in discriminators
        ]
        each = torch.stack(verdicts)
        score = ((sharpness * each).softmax(0) * each).sum(0)
        return batch.mean(task.objective.generator(score)) + self.beta * sharpness.square()

    def posterior(self, server: Jury) -> Point:
        """The generator, and the mean of the round's discriminators, which says less than they do together."""
        return Point(torch.cat([server.generator, server.discriminators.mean(0)]))

    def facts(self, server: Jury) -> dict[str, float]:
        """λ."""
        return {"sharpness": float(server.sharpness)}
