"""Sampled: the weights of several generators and discriminators as those of samples of one of each."""

import torch
from torch import Tensor

from consilience.tasks.layout import MAIN
from consilience.tasks.task import Task

TRUNK, HEADS = "trunk", "heads"  # the discriminators' parts; the generators are the main part


class Sampled(Task):
    """A task with several samples of a generator, which share all but the first child, and of a discriminator, which
    share all but the last."""

    generators: int
    discriminators: int

    @property
    def played(self) -> int:
        """The number of parameters of generators and discriminators; further networks come after them."""
        return int(self.slice(HEADS).stop)

    @property
    def _blocks(self) -> list[tuple[int, int]]:
        """(samples, parameters of each) of the generators' own and shared layers, then of the discriminators' shared
        and own ones."""
        main, *others = (self.layout.parts[name] for name in (MAIN, TRUNK, HEADS))
        own = sum(size for name, size in zip(main.names, main.sizes, strict=True) if name.startswith("heads."))
        shared, trunk, heads = main.size - own, *(part.size for part in others)
        counts = (self.generators, 1, 1, self.discriminators)
        return [(count, size // count) for count, size in zip(counts, (own, shared, trunk, heads), strict=True)]

    def samples(self, theta: Tensor) -> list[Tensor]:
        """All weights [..., P] by sample [..., count, m]: generators' own and shared, then discriminators' shared and
        own."""
        parts = theta[..., : self.played].split_with_sizes([count * size for count, size in self._blocks], -1)
        return [part.view(*part.shape[:-1], *block) for part, block in zip(parts, self._blocks, strict=True)]

    def one(self, theta: Tensor) -> Tensor:
        """One generator and one discriminator [..., M]: the mean over samples of all weights [..., P]."""
        return torch.cat([part.mean(-2) for part in self.samples(theta)], -1)

    @property
    def layers(self) -> dict[str, int]:
        """The number of weights of each layer of one generator and one discriminator, in the order of `one`, by their
        names in the modules that were given: "generator.0.weight", …"""
        trunk = len(self.part(TRUNK))  # type: ignore[arg-type]
        found: dict[str, int] = {}
        for part, own, shared in ((MAIN, "generator.0", "generator"), (TRUNK, "", "discriminator"),
                                  (HEADS, f"discriminator.{trunk}", "")):  # fmt: skip
            network = self.layout.parts[part]
            for name, size in zip(network.names, network.sizes, strict=True):
                if name.startswith("heads."):
                    _, sample, rest = name.split(".", 2)
                    found |= {f"{own}.{rest}": size} if sample == "0" else {}
                else:
                    number, rest = name.removeprefix("trunk.").split(".", 1)
                    found[f"{shared}.{int(number) + (part == MAIN)}.{rest}"] = size
        return found

    def all(self, value: Tensor) -> Tensor:
        """The same weights for every sample: [..., M] to [..., P]."""
        parts = value.split_with_sizes([size for _, size in self._blocks], -1)
        repeated = [
            p.unsqueeze(-2).expand(*p.shape[:-1], count, -1).flatten(-2) if count > 1 else p
            for p, (count, _) in zip(parts, self._blocks, strict=True)
        ]
        return torch.cat(repeated, -1)
