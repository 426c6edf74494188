"""Variants of PFNM's matching for studies: as printed, as in the authors' code, and without a penalty."""

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.matching import BetaBernoulli


@dataclass(frozen=True)
class Printed(BetaBernoulli):
    """Popularity has weight 1, as printed in the paper; the derivation gives 2."""

    def popularity(self, m: Tensor, clients: int) -> Tensor:
        return super().popularity(m, clients) / 2

    def own_popularity(self, used: Tensor, step: int) -> Tensor:
        return super().own_popularity(used, step) / 2


@dataclass(frozen=True)
class Capped(BetaBernoulli):
    """No more than ten clients count in the popularity, as in the authors' code."""

    def popularity(self, m: Tensor, clients: int) -> Tensor:
        return super().popularity(m.clamp_max(10), clients)


@dataclass(frozen=True)
class Authors(Printed, Capped):
    """The authors' code."""


@dataclass(frozen=True)
class WithoutPenalty(BetaBernoulli):
    """New atoms have no penalty −2 log t, and the objective never falls."""

    def opening_penalty(self, t: Tensor) -> Tensor:
        return torch.zeros_like(t)
