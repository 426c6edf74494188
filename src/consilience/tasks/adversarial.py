"""Adversarial: generators and discriminators of one client as functions of one flat vector, like any other task.

There are two losses: the discriminator's L_D(θ_D; θ_G) and the generator's L_G(θ_G; θ_D). `loss_one` is their sum, in
which the weights of each network are constants in the other's loss. So its gradient is that of each network in its own
loss, and both take their steps at once. Methods that need gradients only learn GANs as they learn classifiers: chains,
FedAvg, FedProx, SCAFFOLD, FedEP.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import grad

from consilience.compute.layers import batchnorms
from consilience.compute.passes import Moments
from consilience.core import DataError, TaskError, keys
from consilience.data import Batch, Dataset
from consilience.data.augment import Augmentation
from consilience.metrics import Judge, PrecisionRecall
from consilience.tasks.layout import MAIN
from consilience.tasks.multihead import Generators, Heads
from consilience.tasks.objectives import Objective, Wasserstein
from consilience.tasks.sampled import HEADS, TRUNK, Sampled

AVERAGE = "average"  # the part with the moving average of the generators, if a method keeps one
NOISE, BETWEEN, TURN = keys.word("z"), keys.word("between"), keys.word("turn")
AT_ONCE = 1000  # examples in a pass without gradients


class Adversarial(Sampled):
    """A generator and a discriminator that learn from examples without their labels.

    `generator` maps noise [B, latent] to examples, `discriminator` maps examples to one number each. Both are
    `nn.Sequential`. With `generators` or `discriminators` above one there are several posterior samples of each, which
    share all but the generator's first child and the discriminator's last. The `objective` is a function of the mean
    score of all discriminators. The generator's steps are `pace` times as long as the discriminator's. `augment`
    changes real examples at random. `judges` score generated examples (`consilience.metrics`).

    BatchNorm layers of the generator use the statistics of the examples that are made together; those that samples for
    evaluation use are the statistics of `AT_ONCE` examples from fixed noise, so a sample does not depend on how many
    are drawn. A discriminator takes no BatchNorm: its penalty is on every example's own gradient.
    """

    kind = "adversarial"
    nested = True  # the penalty on a discriminator's gradient

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
        augment: Augmentation | None = None,
        judges: Sequence[Judge] = (PrecisionRecall(),),
    ) -> None:
        for name, module in {"generator": generator, "discriminator": discriminator}.items():
            if not isinstance(module, nn.Sequential) or not len(module):
                raise TaskError(f"the {name} must be an nn.Sequential: every sample has its own outermost layer")
        if min(latent, generators, discriminators) < 1 or not pace > 0:
            raise TaskError(
                "latent, generators and discriminators must be at least 1 and pace positive, got "
                f"{latent}, {generators}, {discriminators} and {pace}"
            )
        *trunk, last = discriminator
        for name, layer in batchnorms(discriminator).items():
            raise TaskError(
                f"layer {name!r} ({type(layer).__name__}) makes a discriminator's score depend on the batch, and the "
                "penalty needs every example's own: leave it out, or use consilience.models.replace_batchnorm(model)"
            )
        for name, layer in batchnorms(generator[0]).items():
            raise TaskError(
                f"layer {name!r} ({type(layer).__name__}) is in the generator's first child, of which every sample has "
                "its own: move it behind that child"
            )
        makers, heads = Generators(generator, generators), Heads(last, discriminators)
        super().__init__({MAIN: makers, TRUNK: nn.Sequential(*trunk), HEADS: heads}, augment=augment)
        self.latent, self.generators, self.discriminators = latent, generators, discriminators
        self.objective: Objective = objective or Wasserstein()
        self.judges = tuple(judges)
        self._pace = pace
        self._paces: Tensor | None = None

    def with_samples(self, generators: int, discriminators: int) -> Adversarial:
        """The same networks with other numbers of samples."""
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
            augment=self.augment,
            judges=self.judges,
        )

    @property
    def pace(self) -> Tensor | None:
        """`pace` for the generator, 1 for all else."""
        return self._paces

    @property
    def estimates(self) -> bool:
        """False: the statistics of a generator's BatchNorm layers come from noise, and no client is asked."""
        return False

    def averaging(self) -> Self:
        raise TaskError(
            "a generator's BatchNorm layers have no running averages: their statistics come from fixed noise; choose "
            "FedGAN, or use consilience.models.replace_batchnorm(model)"
        )

    def prepare(self, *args: Any, **options: Any) -> Self:
        new = super().prepare(*args, **options)
        if new._pace != 1:
            new._paces = torch.ones(new.size, device=new.device, dtype=new.dtype)
            new._paces[new.slice()] = new._pace
        return new

    def settings(self) -> dict[str, Any]:
        trunk, heads = (str(self.part(name)) for name in (TRUNK, HEADS))
        return {"discriminator": f"{trunk} {heads}", "objective": f"{self.objective}", "pace": f"{self._pace}"}

    @property
    def features(self) -> int:
        """The number of inputs of the discriminators' last layers."""
        last = self.part(HEADS).heads[0]  # type: ignore[index]
        if not isinstance(last, nn.Linear):
            raise TaskError(f"the discriminator's last child must be an nn.Linear, not {type(last).__name__}")
        return last.in_features

    def trunk(self, theta: Tensor) -> nn.Module:
        """The discriminators' shared layers with the weights θ: a module that takes examples to features."""
        part, module = self.layout.parts[TRUNK], copy.deepcopy(self.part(TRUNK))
        module.load_state_dict(part.weights(theta.to(self.device), self.dtype))
        return module.eval()

    def latents(self, key: Tensor, count: int) -> Tensor:
        """Noise z [count, latent] for one key; row i is the same for every count."""
        drawn = keys.standard(keys.fold(key, NOISE), count * self.latent, self.dtype)
        return drawn.view(count, self.latent)

    def features_one(
        self, theta: Tensor, x: Tensor, key: Tensor | None = None, w: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One client's (input of the discriminators' last layers, one vector an example; their scores [B, count])."""
        features, scores = self._discriminate(self.split(theta), x, key)
        return features.flatten(1), scores.mT

    def _discriminate(self, parts: dict[str, Tensor], x: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
        features: Tensor = self.call_one(TRUNK, parts[TRUNK], x, key=key)
        return features, self.call_one(HEADS, parts[HEADS], features, key=key)

    def score_one(self, parts: dict[str, Tensor], x: Tensor, key: Tensor | None = None) -> Tensor:
        """d [B], the mean score of one client's discriminators."""
        return self._discriminate(parts, x, key)[1].mean(0)

    def loss_one(self, theta: Tensor, batch: Batch) -> Tensor:
        return self.game_one(theta, batch)

    def game_one(self, theta: Tensor, batch: Batch, past: Tensor | None = None) -> Tensor:
        """L_D + L_G of one client. The value is L_D alone, as L_G would mostly cancel it; the gradient is of both.
        With `past` heads L_G includes the loss against discriminators of the past, on the present trunk."""
        parts = self.split(theta)
        made = self.made_one(parts[MAIN], batch)
        against = self.generator_loss_one(parts, made, batch, past)
        return self.discriminator_loss_one(parts, made.detach(), batch) + (against - against.detach())

    def discriminator_turn_one(self, theta: Tensor, batch: Batch) -> Tensor:
        """L_D of one client: the generators' weights are constants."""
        parts = self.split(theta)
        return self.discriminator_loss_one(parts, self.made_one(parts[MAIN].detach(), batch), batch)

    def generator_turn_one(self, theta: Tensor, batch: Batch, past: Tensor | None = None, generated: int = 1) -> Tensor:
        """L_G of one client on new noise, `generated` examples for each in the batch: the discriminators' weights are
        constants."""
        parts, w = self.split(theta), batch.w.repeat_interleave(generated, output_size=generated * batch.size)
        mine = Batch((), (), w, keys.fold(batch.key, TURN))
        return self.generator_loss_one(parts, self.made_one(parts[MAIN], mine), mine, past)

    def made_one(self, makers: Tensor, batch: Batch) -> Tensor:
        """One client's generated examples, as many as the batch has rows."""
        z = self.latents(batch.key, batch.size)
        made: Tensor = self.call_one(MAIN, makers, z, key=batch.key, w=batch.w)
        return made

    def generator_loss_one(
        self, parts: dict[str, Tensor], made: Tensor, batch: Batch, past: Tensor | None = None
    ) -> Tensor:
        """φ₃(d(G(z))), and φ₃ of the scores of past discriminators."""
        fixed = {name: part.detach() for name, part in parts.items()}
        features, scores = self._discriminate(fixed, made, batch.key)
        loss = batch.mean(self.objective.generator(scores.mean(0)))
        if past is None:
            return loss
        before: Tensor = self.call_one(HEADS, past, features, key=batch.key)
        return loss + batch.mean(self.objective.generator(before.mean(0)))

    def discriminator_loss_one(self, parts: dict[str, Tensor], made: Tensor, batch: Batch) -> Tensor:
        """φ₁(d(x)) + φ₂(d(G(z))), and the penalty."""
        # Interleaved and not concatenated: the place of an example must not depend on their number.
        both = torch.stack([batch.x, made], 1).flatten(0, 1)
        real, fake = self.score_one(parts, both, batch.key).view(-1, 2).unbind(1)
        loss = batch.mean(self.objective.real(real) + self.objective.fake(fake))
        if not self.objective.penalty:
            return loss
        share = keys.uniform(keys.fold(batch.key, BETWEEN), len(made), made.dtype)
        between = torch.lerp(batch.x, made, share.view(-1, *[1] * (made.dim() - 1)))
        gradient = grad(lambda x: self.score_one(parts, x, batch.key).sum())(between)
        # An example's own gradient: without batch norm, d(x) depends on x alone.
        return loss + self.objective.penalty * batch.mean(self.objective.excess(gradient))

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        """The scores d [N] of examples x [N, ...] for θ [P], without a fixed scale."""
        parts = self.split(theta.to(self.dtype))
        with torch.no_grad():
            return torch.cat([self.score_one(parts, some) for some in torch.split(x, AT_ONCE)])

    def generate(self, theta: Tensor, count: int, seed: int = 0) -> Tensor:
        """`count` examples of θ's generators, in model units; the first ones are the same for every count."""
        z = self.latents(keys.key(seed, purpose="generate"), count).to(self.device)
        whole = max(AT_ONCE // self.generators, 1) * self.generators  # so that generators keep their turns
        theta, part = theta.to(self.dtype), self._shown
        given = list(self._moments(theta).values()) or None
        with torch.no_grad():
            made = [self.networks.call(part, theta, some, given=given) for some in torch.split(z, whole)]
        return torch.cat(made)

    def release(self, theta: Tensor) -> nn.Module:
        shown, found = theta.clone(), self._moments(theta.to(self.device, self.dtype))
        shown[self.slice()] = theta[self.slice(self._shown)]
        module = super().release(shown)
        for name, (mean, var) in found.items():
            for buffer, value in (("running_mean", mean), ("running_var", var)):
                entry = module.get_buffer(f"{name}.{buffer}")
                entry.data = value.to(entry.device, entry.dtype)
        return module

    @property
    def _shown(self) -> str:
        """The part whose generators make examples for evaluation."""
        return AVERAGE if AVERAGE in self.layout.parts else MAIN

    def _moments(self, theta: Tensor) -> dict[str, Moments]:
        """The statistics of the generator's BatchNorm layers, in the order of their calls, over fixed noise."""
        layers, part = self.layout.main.batchnorms, self._shown
        if not layers:
            return {}
        z = self.latents(keys.key(0, purpose="statistics"), AT_ONCE).to(self.device)
        with torch.no_grad():
            _, seen = self.networks.watched(lambda: self.networks.call(part, theta, z, w=torch.ones_like(z[:, 0])))
        module = self.networks.functions[part].evaluation[0]
        name_of = {id(module.get_submodule(name).running_mean): name for name in layers}
        return {name_of[id(mean)]: moments for mean, _, moments, _ in seen}

    def check(self, data: Dataset, targets: bool = True) -> None:
        """Raise an error if the networks do not fit each other or the data."""
        if not len(data):
            raise DataError(f"{data.name} has no examples")
        x = data.inputs(torch.arange(min(2, len(data)), device=data.device), self.dtype).to(self.device)
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
