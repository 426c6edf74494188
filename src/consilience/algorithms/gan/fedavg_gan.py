"""FedAvg-GAN: the generator stays at the server, clients train the discriminator (Augenstein et al., 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.gan.players import adversarial
from consilience.core import keys
from consilience.core.errors import ConfigError
from consilience.core.records import Point, Weighted, record
from consilience.data.batch import Batch
from consilience.data.cohort import Cohort, Info
from consilience.optim import Adam, Chain
from consilience.optim.chain import Memory
from consilience.tasks.adversarial import Adversarial
from consilience.tasks.task import MAIN, Task

SHORT = Adam(lr=3e-4, beta1=0.5, batch_size=128, longest=6)  # the papers' six steps a round
MAKER = Adam(lr=3e-4, beta1=0.5, batch_size=128)


@record
class Workshop:
    """The generator [G] with its optimiser's memory, and the discriminator [D]."""

    generator: Tensor
    discriminator: Tensor
    memory: Memory


@algorithm
class FedAvgGAN(Algorithm):
    """θ_D ← θ_D + Σ p_k (θ_D,k − θ_D) after `train` at the clients against a generator that does not move; then, at the
    server, `steps` steps of `maker` on L_G(θ_G; θ_D). The generator never meets data, and clients need not train it.
    With `Private` around it, it is DP-FedAvg-GAN."""

    train: Chain = SHORT
    maker: Chain = MAKER
    steps: int = 6
    single: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps must be at least 1, got {self.steps}")
        check_maker(self.maker)

    @property
    def name(self) -> str:
        """As in the papers."""
        return "FedAvg-GAN"

    def adapt(self, task: Task, seed: int) -> Task:
        """As it is, or with one player each."""
        return adversarial(task, self.name, self.single)

    def start(self, task: Adversarial, info: Info) -> Workshop:
        """The modules' own weights."""
        made = task.slice(MAIN).stop
        generator = info.initial[:made].clone()
        return Workshop(generator, info.initial[made:].clone(), self.maker.memory(generator.unsqueeze(0)))

    def message(self, server: Workshop, ids: object) -> Point:
        """Both networks."""
        return Point(torch.cat([server.generator, server.discriminator]))

    def local(self, task: Adversarial, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        """Train the discriminator; send n_k times its change."""
        made = task.slice(MAIN).stop
        generator, before = message.theta[:made], message.theta[made:]
        return Weighted.of(Point(trained(self.train, task, generator, before, cohort) - before), cohort.n), None

    def fuse(self, server: Workshop, update: Weighted) -> Workshop:
        """The mean discriminator."""
        return Workshop(server.generator, server.discriminator + update.mean.theta, server.memory)

    def advance(self, task: Adversarial, server: Workshop, key: Tensor) -> Workshop:
        """Train the generator."""
        theta, memory = server.generator.unsqueeze(0).clone(), tuple(part.clone() for part in server.memory)
        gradient = task.gradient(type(self).against)
        for step in range(self.steps):
            batch = blank(task, keys.fold(key, f"step {step}"), self.maker.batch_size)
            slope, _ = gradient(theta, batch, shared=(server.discriminator,))
            take(self.maker, theta, memory, slope)
        return Workshop(theta[0], server.discriminator, memory)

    @staticmethod
    def against(task: Adversarial, theta: Tensor, batch: Batch, discriminator: Tensor) -> Tensor:
        """L_G of one generator."""
        parts = task.split(torch.cat([theta, discriminator]))
        made = task.call_one(MAIN, parts[MAIN], task.latents(batch.key, len(batch.w)), key=batch.key)
        return task.generator_loss_one(parts, made, batch)

    def posterior(self, server: Workshop) -> Point:
        """Both networks."""
        return self.message(server, None)


def trained(train: Chain, task: Adversarial, generator: Tensor, before: Tensor, cohort: Cohort) -> Tensor:
    """Discriminators [K, D] after local training from `before` [D] or [K, D] against one generator [G]."""
    *_, theta = train.iterates(task.gradient(detect), before, cohort, shared=(generator,))  # their pace is 1
    return theta


def detect(task: Adversarial, theta: Tensor, batch: Batch, generator: Tensor) -> Tensor:
    """L_D of one client's discriminator."""
    parts = task.split(torch.cat([generator, theta]))
    made = task.call_one(MAIN, generator, task.latents(batch.key, len(batch.x)), key=batch.key)
    return task.discriminator_loss_one(parts, made, batch)


def blank(task: Adversarial, key: Tensor, count: int) -> Batch:
    """A cohort of one without examples, only weights and a key, for a server that has no data."""
    weight = torch.ones(1, count, dtype=task.dtype, device=task.device)
    return Batch(weight, weight, weight, key.view(1))


def check_maker(chain: Chain) -> None:
    """Refuse what a server's optimiser would not do: it has steps and a batch, and neither data nor epochs."""
    unused = {"epochs": 1, "longest": None, "weight_decay": 0, "schedule": None, "noise": 0, "temperature": 0}
    for name, usual in unused.items():
        if getattr(chain, name, usual) != usual:
            raise ConfigError(f"maker.{name} has no effect at the server: leave it out, got {getattr(chain, name)}")


def take(chain: Chain, theta: Tensor, memory: Memory, slope: Tensor) -> None:
    """One step of a chain at the server, in place, with no noise of its own."""
    chain.move(
        theta, memory, slope, torch.ones_like(theta[:, :1]), torch.zeros_like(theta) if chain.noisy else None, chain.lr
    )
