"""DPPVI: partitioned variational inference with differential privacy at the clients (Heikkilä et al., 2023)."""

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.fedep import Client
from consilience.algorithms.pvi import PVI
from consilience.algorithms.shared.accounting import epsilon
from consilience.algorithms.shared.factors import Server
from consilience.algorithms.shared.judging import LEFT
from consilience.core import ConfigError, Count, Gaussian, NonNegative, Positive, guards, keys
from consilience.data.cohort import Cohort, Info
from consilience.inference import Identity, Newton
from consilience.optim import DPSGD
from consilience.tasks.task import Task


@algorithm
class DPPVI(PVI):
    """PVI whose clients add noise to their own updates, so that neither the server nor anybody else learns much about
    their data. In units of q, Δ_k is the vector u = (ΔΛ/Λ, (Δη − μΔΛ)/√Λ); the client sends and applies to its site

    Δ̃_k of ũ = u min(1, clip/‖u‖) + N(0, (noise · clip / parts)²), damped. So q = p₀ Π t_k holds exactly.

    With one part, ε protects all data of a client. With more, a client divides its examples into `parts`, infers from
    each on its own, p(part|θ)^parts times the cavity, and clips and averages the results: ε then protects one example,
    or several of one part, with less noise. A local optimiser `DPSGD` in `Identity` protects single examples too, and
    needs no noise in the update: `clip=None, noise=0`. ε at `delta` is in every round's metrics, for clients that have
    taken part in all rounds; it is the smaller of both. Numbers of examples are not protected, nor are losses.

    The noise comes from the operating system; `noise_from="seed"` is for simulations that are repeated. Noise that
    would leave too little of q's precision is cut off and counted."""

    clip: Positive | None = 1.0
    noise: NonNegative = 1.0
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    parts: Count = 1
    noise_from: Literal["system", "seed"] = "system"

    def __post_init__(self) -> None:
        if isinstance(self.infer, Newton) and not self.infer.diagonal:
            raise ConfigError("DPPVI needs diagonal precisions, of which it knows the units: Newton(diagonal=True)")
        if self.noise and self.clip is None:
            raise ConfigError("noise hides updates of a bounded length only: give a clip, or noise = 0")
        self.spent(1)  # fails here, not after a round, if the accountant is not installed

    def spent(self, releases: int) -> float:
        """ε after as many updates of a client; inf if nothing is protected."""
        found = epsilon(self.noise, 1, 1, releases, self.delta)
        train = getattr(self.infer, "train", None)
        if isinstance(self.infer, Identity) and isinstance(train, DPSGD):
            found = min(found, epsilon(train.noise, 1, 1, releases * train.epochs, self.delta))
        return found

    def start(self, task: Task, info: Info) -> Server:
        if info.before is not None:
            raise ConfigError("DPPVI must be the whole run: ε would not count the rounds before it")
        return super().start(task, info)

    def local(self, task: Task, message: Gaussian, state: Any, cohort: Cohort) -> tuple[Gaussian, Client]:
        q, spent = message.proper(), self.spent(cohort.round)
        cavity = self.cavity(q, state, cohort.share).informative()
        relative = torch.stack([self._relative(task, cavity, q, part) for part in self._parts(cohort)]).mean(0)
        if self.noise:
            relative = self._noised(relative, cohort)
        delta = _from_units(relative, q) ** self._power(cohort.round_size)
        if math.isfinite(spent):
            cohort.note(epsilon=torch.full_like(cohort.n[:, 0], spent))
        return delta, self.follow(state, delta)

    def _parts(self, cohort: Cohort) -> Iterable[Cohort]:
        return (cohort,) if self.parts == 1 else cohort.parts(self.parts)

    def _relative(self, task: Task, cavity: Gaussian, q: Gaussian, cohort: Cohort) -> Tensor:
        """u of a part of the data [K, …], clipped."""
        root = 1 / self.parts
        tilted = self.infer.near(task, cavity**root, q, cohort, power=self.parts)
        u = _in_units(self.infer.refinement(tilted, q), q)
        if self.clip is None:
            return u
        length: Tensor = u.norm(dim=1, keepdim=True)
        guards.count("update clipped", length > self.clip)
        shrink = self.clip / length.clamp_min(self.clip)
        return u * shrink

    def _noised(self, u: Tensor, cohort: Cohort) -> Tensor:
        """u with noise, which leaves the clients of a round together a share `LEFT` of q's precision."""
        by_seed = self.noise_from == "seed"
        drawn = cohort.noise(len(u), u.shape[1], tag="site") if by_seed else keys.system_normal(*u.shape).to(u)
        noisy = u + (self.clip or 0.0) * self.noise / self.parts * drawn
        if not self.infer.measures_precision:  # the first entry is a constant, which says nothing
            return torch.cat([u[:, :1], noisy[:, 1:]], 1)
        lam, eta = noisy.tensor_split(2, 1)
        least = -(1 - LEFT) / (self._power(cohort.round_size) * cohort.round_size)
        guards.count("noisy precision raised", lam < least)
        return torch.cat([lam.clamp_min(least), eta], 1)


def _in_units(delta: Gaussian, q: Gaussian) -> Tensor:
    """(ΔΛ/Λ, (Δη − μΔΛ)/√Λ) as one vector [K, P + P or 1 + P]."""
    return torch.cat([delta.lam / q.lam, (delta.eta - q.mean * delta.lam) / q.lam.sqrt()], 1)


def _from_units(u: Tensor, q: Gaussian) -> Gaussian:
    size = q.eta.shape[-1]
    lam = u[:, :-size] * q.lam
    return Gaussian(u[:, -size:] * q.lam.sqrt() + q.mean * lam, lam)
