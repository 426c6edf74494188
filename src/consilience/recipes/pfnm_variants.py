"""Variants of PFNM's matching for studies: as printed, as in the authors' code, without a penalty, and with other
precisions of the weights to classes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from consilience.core import ConfigError
from consilience.matching import BetaBernoulli, Clusters, Known, Units


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


def _even(clients: Sequence[Units]) -> Tensor:
    """J / Σ_j precision_j [D]: 1 where all clients have the precision 1, J where they have shares."""
    total = torch.stack([units.precision for units in clients]).sum(0)
    return torch.where(total > 0, len(clients) / total, torch.ones_like(total))


@dataclass(frozen=True)
class EvenShares(BetaBernoulli):
    """A client's weights to class c have the precision J (n_jc / n_c) / σ², which is 1/σ², that of all other weights,
    where the clients have equally many examples of the class."""

    def cluster(self, clients: Sequence[Units], mean: Tensor, known: Known | None, seed: int) -> Clusters:
        even = _even(clients)
        return super().cluster([Units(u.values, u.precision * even) for u in clients], mean, known, seed)


@dataclass(frozen=True)
class EvenPriors(BetaBernoulli):
    """As `EvenShares`, with the prior precision J/σ₀² in the same coordinates. The posterior mean is then that of the
    shares; the weights to classes count J times as much in the assignment."""

    def cluster(self, clients: Sequence[Units], mean: Tensor, known: Known | None, seed: int) -> Clusters:
        if known is not None:
            raise ConfigError("EvenPriors has no posterior to continue a stream from")
        # Both precisions times J are values times √J.
        unit = _even(clients).sqrt()
        found = super().cluster([Units(u.values * unit, u.precision) for u in clients], mean * unit, known, seed)
        return replace(found, eta=found.eta / unit)
