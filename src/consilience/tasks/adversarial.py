"""Adversarial: generators and discriminators of one client as functions of one flat vector, like any other task.

Two players, two losses: the discriminator's L_D(θ_D; θ_G) and the generator's L_G(θ_G; θ_D). `loss_one` is their sum,
in which each player's weights are constants to the other's loss. So its gradient is each player's own, both steps are
taken at once, and whatever needs no more than a gradient learns GANs as it learns classifiers: chains, FedAvg,
FedProx, SCAFFOLD, FedEP.
"""

from __future__ import annotations

import copy
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import grad

from consilience.core import keys
from consilience.core.errors import ConfigError, DataError, TaskError
from consilience.data.batch import Batch
from consilience.data.dataset import Dataset
from consilience.metrics.generative import Judge, PrecisionRecall
from consilience.tasks.task import MAIN, Task, _Part

TRUNK, HEADS = "trunk", "heads"  # the discriminators' parts; the generators are the main one
NOISE, BETWEEN = keys.word("z"), keys.word("between")
AT_ONCE = 1000  # examples in a pass without gradients


@dataclass(frozen=True)
class Objective(ABC):
    """What the players want, as losses of each example's score d, the higher the more it looks like data. `penalty` λ
    adds λ (‖∂d/∂x‖ − 1)² between real and generated examples to the discriminator's loss (Gulrajani et al., 2017)."""

    penalty: float = 0.0

    def __post_init__(self) -> None:
        if not self.penalty >= 0:
            raise ConfigError(f"penalty must not be negative, got {self.penalty}")

    @abstractmethod
    def real(self, d: Tensor) -> Tensor:
        """The discriminator's loss of a real example."""

    @abstractmethod
    def fake(self, d: Tensor) -> Tensor:
        """The discriminator's loss of a generated one."""

    @abstractmethod
    def generator(self, d: Tensor) -> Tensor:
        """The generator's loss of one that it made."""


@dataclass(frozen=True)
class Wasserstein(Objective):
    """−d(x) + d(G(z)) against −d(G(z)): WGAN-GP, with λ = 10."""

    penalty: float = 10.0

    def real(self, d: Tensor) -> Tensor:
        """−d."""
        return -d

    def fake(self, d: Tensor) -> Tensor:
        """d."""
        return d

    def generator(self, d: Tensor) -> Tensor:
        """−d."""
        return -d


@dataclass(frozen=True)
class LeastSquares(Objective):
    """(d(x) − 1)² + d(G(z))² against (d(G(z)) − 1)²: LS-GAN (Mao et al., 2017)."""

    def real(self, d: Tensor) -> Tensor:
        """(d − 1)²."""
        return (d - 1).square()

    def fake(self, d: Tensor) -> Tensor:
        """d²."""
        return d.square()

    def generator(self, d: Tensor) -> Tensor:
        """(d − 1)²."""
        return (d - 1).square()


class Generators(nn.Module):
    """Several generators that share all but their first layer; example i is made by generator i mod count."""

    def __init__(self, module: nn.Sequential, count: int) -> None:
        super().__init__()
        first, *rest = module
        self.heads, self.trunk = _copies(first, count), nn.Sequential(*rest)

    def forward(self, z: Tensor) -> Tensor:
        """Noise [B, latent] to examples [B, ...]."""
        count = len(self.heads)
        padded = F.pad(z, (0, 0, 0, -len(z) % count))
        made = torch.stack([head(padded[i::count]) for i, head in enumerate(self.heads)], 1)
        out: Tensor = self.trunk(made.flatten(0, 1)[: len(z)])
        return out


class Heads(nn.Module):
    """The last layers of several discriminators that share all others."""

    def __init__(self, last: nn.Module, count: int) -> None:
        super().__init__()
        self.heads = _copies(last, count)

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, ...] to every discriminator's scores [count, B]."""
        return torch.stack([head(features).reshape(len(features)) for head in self.heads])


def _copies(module: nn.Module, count: int) -> nn.ModuleList:
    """The module, and others like it: weight matrices are drawn with its own mean and deviation, vectors are copies.
    The draws follow from its weights."""
    found = [module]
    seed = zlib.crc32(b"".join(p.detach().cpu().numpy().tobytes() for p in module.parameters()))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count - 1):
        other = copy.deepcopy(module)
        for p in other.parameters():
            if p.dim() > 1:
                noise = torch.randn(p.shape, generator=generator).to(p)
                p.data = p.data.mean() + p.data.std(correction=0) * noise
        found.append(other)
    return nn.ModuleList(found)


class Adversarial(Task):
    """Learn to make examples like those of the data; labels are not looked at.

    `generator` takes noise [B, latent] to examples, `discriminator` examples to one number each. Both are
    `nn.Sequential`; with `generators` or `discriminators` above one there are several posterior samples of each, which
    share all but the generator's first child and the discriminator's last. The players' `objective` is on the mean
    score of all discriminators. The generator's steps are `pace` times as long as the discriminator's. `judges` score
    what is made (`consilience.metrics`).
    """

    kind = "adversarial"
    nested = True  # the penalty on a discriminator's slope

    def __init__(
        self,
        generator: nn.Sequential,
        discriminator: nn.Sequential,
        *,
        latent: int,
        generators: int = 1,
        discriminators: int = 1,
        objective: Objective | None = None,
        pace: float = 1.0,
        judges: Sequence[Judge] = (PrecisionRecall(),),
    ) -> None:
        for name, module in {"generator": generator, "discriminator": discriminator}.items():
            if not isinstance(module, nn.Sequential) or not len(module):
                raise TaskError(
                    f"the {name} must be an nn.Sequential, whose outermost layer each sample has of its own"
                )
        if min(latent, generators, discriminators) < 1 or not pace > 0:
            raise TaskError(
                "latent, generators and discriminators must be at least 1 and pace positive, got "
                f"{latent}, {generators}, {discriminators} and {pace}"
            )
        super().__init__(Generators(generator, generators))
        *trunk, last = discriminator
        for name, part in {TRUNK: nn.Sequential(*trunk), HEADS: Heads(last, discriminators)}.items():
            self._parts[name] = _Part(part, self.size)
        self.latent, self.generators, self.discriminators = latent, generators, discriminators
        self.objective: Objective = objective or Wasserstein()
        self.judges = tuple(judges)
        self._pace = pace
        self._paces: Tensor | None = None

    def with_samples(self, generators: int, discriminators: int) -> Adversarial:
        """The same players, with other numbers of samples."""
        (first, *_), rest = self.part(MAIN).heads, self.part(MAIN).trunk  # type: ignore[misc]
        (last, *_), trunk = self.part(HEADS).heads, self.part(TRUNK)  # type: ignore[misc]
        return Adversarial(
            nn.Sequential(first, *rest),  # type: ignore[misc]
            nn.Sequential(*trunk, last),  # type: ignore[misc]
            latent=self.latent,
            generators=generators,
            discriminators=discriminators,
            objective=self.objective,
            pace=self._pace,
            judges=self.judges,
        )

    @property
    def pace(self) -> Tensor | None:
        """`pace` for the generator, 1 for all else."""
        return self._paces

    def prepare(self, *args: Any, **options: Any) -> Self:
        """This task on a device."""
        new = super().prepare(*args, **options)
        if new._pace != 1:
            new._paces = torch.ones(new.size, device=new.device, dtype=new.dtype)
            new._paces[new.slice()] = new._pace
        return new

    def settings(self) -> dict[str, Any]:
        """The other player, and the rules."""
        trunk, heads = (str(self._parts[name].module) for name in (TRUNK, HEADS))
        return {"discriminator": f"{trunk} {heads}", "objective": f"{self.objective}", "pace": f"{self._pace}"}

    @property
    def played(self) -> int:
        """How many numbers of θ are the players', from the first on; further networks come after them."""
        return int(self.slice(HEADS).stop)

    @property
    def _blocks(self) -> list[tuple[int, int]]:
        """(samples, numbers each) of the generators' own layers and shared ones, then the discriminators'."""
        main = self._parts[MAIN]
        own = sum(size for name, size in zip(main.names, main.sizes, strict=True) if name.startswith("heads."))
        shared, trunk, heads = sum(main.sizes) - own, *(sum(self._parts[name].sizes) for name in (TRUNK, HEADS))
        counts = (self.generators, 1, 1, self.discriminators)
        return [(count, size // count) for count, size in zip(counts, (own, shared, trunk, heads), strict=True)]

    def samples(self, theta: Tensor) -> list[Tensor]:
        """All players' weights [..., P] by sample [..., count, m]: generators' own and shared, then discriminators'
        shared and own."""
        parts = theta[..., : self.played].split_with_sizes([count * size for count, size in self._blocks], -1)
        return [part.view(*part.shape[:-1], *block) for part, block in zip(parts, self._blocks, strict=True)]

    def one(self, theta: Tensor) -> Tensor:
        """The mean over samples of one generator and one discriminator [..., M], of all players' weights [..., P]."""
        return torch.cat([part.mean(-2) for part in self.samples(theta)], -1)

    def all(self, value: Tensor) -> Tensor:
        """The same numbers for every sample: [..., M] to [..., P]."""
        parts = value.split_with_sizes([size for _, size in self._blocks], -1)
        repeated = [
            p.unsqueeze(-2).expand(*p.shape[:-1], count, -1).flatten(-2) if count > 1 else p
            for p, (count, _) in zip(parts, self._blocks, strict=True)
        ]
        return torch.cat(repeated, -1)

    @property
    def features(self) -> int:
        """How many features the discriminators' last layers see."""
        last = self.part(HEADS).heads[0]  # type: ignore[index]
        if not isinstance(last, nn.Linear):
            raise TaskError(f"the discriminator's last child must be an nn.Linear, not {type(last).__name__}")
        return last.in_features

    def latents(self, key: Tensor, count: int) -> Tensor:
        """z [count, latent] for one key; row i is the same for every count."""
        drawn = keys.standard(keys.fold(key, NOISE), count * self.latent, self.dtype)
        return drawn.view(count, self.latent)

    def features_one(self, theta: Tensor, x: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One client's (input of the discriminators' last layers, a vector an example; their scores [B, count])."""
        features, scores = self._seen_by(self.split(theta), x, key)
        return features.flatten(1), scores.mT

    def _seen_by(self, parts: dict[str, Tensor], x: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
        features: Tensor = self.call_one(TRUNK, parts[TRUNK], x, key=key)
        return features, self.call_one(HEADS, parts[HEADS], features, key=key)

    def score_one(self, parts: dict[str, Tensor], x: Tensor, key: Tensor | None = None) -> Tensor:
        """d [B], the mean score of one client's discriminators."""
        return self._seen_by(parts, x, key)[1].mean(0)

    def loss_one(self, theta: Tensor, batch: Batch) -> Tensor:
        """Both players' losses, as they are to each."""
        return self.game_one(theta, batch)

    def game_one(self, theta: Tensor, batch: Batch, past: Tensor | None = None) -> Tensor:
        """L_D + L_G of one client. The value is L_D alone, as L_G would mostly cancel it; the gradient is of both.
        With `past` heads L_G is also that against discriminators of the past, on the present trunk."""
        parts = self.split(theta)
        made = self.call_one(MAIN, parts[MAIN], self.latents(batch.key, len(batch.x)), key=batch.key)
        against = self.generator_loss_one(parts, made, batch, past)
        return self.discriminator_loss_one(parts, made.detach(), batch) + (against - against.detach())

    def generator_loss_one(
        self, parts: dict[str, Tensor], made: Tensor, batch: Batch, past: Tensor | None = None
    ) -> Tensor:
        """φ₃(d(G(z))), and φ₃ of what past discriminators would say."""
        fixed = {name: part.detach() for name, part in parts.items()}
        features, scores = self._seen_by(fixed, made, batch.key)
        loss = batch.mean(self.objective.generator(scores.mean(0)))
        if past is None:
            return loss
        before: Tensor = self.call_one(HEADS, past, features, key=batch.key)
        return loss + batch.mean(self.objective.generator(before.mean(0)))

    def discriminator_loss_one(self, parts: dict[str, Tensor], made: Tensor, batch: Batch) -> Tensor:
        """φ₁(d(x)) + φ₂(d(G(z))), and the penalty."""
        # In turn, and not one after the other: where an example stands must not depend on how many there are.
        both = torch.stack([batch.x, made], 1).flatten(0, 1)
        real, fake = self.score_one(parts, both, batch.key).view(-1, 2).unbind(1)
        loss = batch.mean(self.objective.real(real) + self.objective.fake(fake))
        if not self.objective.penalty:
            return loss
        share = keys.uniform(keys.fold(batch.key, BETWEEN), len(made), made.dtype)
        between = torch.lerp(batch.x, made, share.view(-1, *[1] * (made.dim() - 1)))
        slope = grad(lambda x: self.score_one(parts, x, batch.key).sum())(between)
        # An example's own gradient: with no batch norm, d(x) depends on x alone.
        length = (slope.flatten(1).square().sum(1) + 1e-12).sqrt()
        return loss + self.objective.penalty * batch.mean((length - 1).square())

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        """d [N] for θ [P] and x [N, ...]: how much examples look like data, on no particular scale."""
        parts = self.split(theta.to(self.dtype))
        with torch.no_grad():
            return torch.cat([self.score_one(parts, some) for some in torch.split(x, AT_ONCE)])

    def generate(self, theta: Tensor, count: int, seed: int = 0) -> Tensor:
        """`count` examples of θ's generators, in model units; the first ones are the same for every count."""
        z = self.latents(keys.key(seed, purpose="generate"), count).to(self.device)
        whole = max(AT_ONCE // self.generators, 1) * self.generators  # so that every generator goes on where it was
        with torch.no_grad():
            return torch.cat([self.apply_one(theta.to(self.dtype), some) for some in torch.split(z, whole)])

    def check(self, data: Dataset, targets: bool = True) -> None:
        """Refuse networks that do not fit each other and the data."""
        if not len(data):
            raise DataError(f"{data.name} has no examples")
        x = data.inputs(torch.arange(min(2, len(data)), device=data.x.device), self.dtype).to(self.device)
        shape, theta = tuple(x.shape[1:]), self.initial()
        try:
            made = self.generate(theta, len(x))
        except Exception as error:
            raise TaskError(f"the generator cannot take noise of {self.latent} numbers: {error}") from error
        if tuple(made.shape[1:]) != shape:
            raise DataError(f"the generator makes examples of shape {tuple(made.shape[1:])}; {data.name} has {shape}")
        try:
            self.predict(theta, x)
        except Exception as error:
            raise DataError(
                f"the discriminator cannot score examples of {data.name}, of shape {shape}: {error}"
            ) from error

    def need_labels(self) -> NoReturn:
        """There are none."""
        raise TaskError(
            "an adversarial task has no labels to predict, and this needs a likelihood. FedGAN, ProbGAN and EPGAN are "
            "made for it; methods that need no more than gradients (FedAvg, FedProx, SCAFFOLD, FedEP) can learn it, too"
        )

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """None."""
        self.need_labels()

    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        """None."""
        self.need_labels()

    def predictive(self, output: Tensor) -> Tensor:
        """None."""
        self.need_labels()

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        """None."""
        self.need_labels()

    def fits(self, output: Tensor, data: Dataset) -> None:
        """None."""
        self.need_labels()
