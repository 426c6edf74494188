"""What methods that pass Gaussian factors share: a global belief in natural parameters, and steps on it."""

from __future__ import annotations

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.fedavg import Averaged
from consilience.core import guards
from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.core.records import record, tree_map
from consilience.data.cohort import Cohort, Info
from consilience.inference import Identity, Tilted
from consilience.server.optimizers import Moments, Momentum, ServerOptimizer, carry_over
from consilience.tasks.task import Task


@record
class Believed:
    """The global posterior q and the server optimiser's memory."""

    q: Gaussian
    memory: Moments


@algorithm
class Natural(Algorithm):
    """q ← q · optimiser(Π_k Δ_k^δ): clients send what they learned as a factor Δ_k, and factors multiply.

    `infer` finds each client's tilted distribution. `damping` is δ, 1/K for the K clients of a round when None. `clip`
    limits the length of a Δ_k's natural parameters. `prior` is the precision of p₀ = N(0, 1/prior), which no client
    holds: q = p₀ · Π sites.
    """

    infer: Tilted = Identity()
    server: ServerOptimizer = Momentum()
    damping: float | None = None
    clip: float | None = None
    prior: float = 0.0

    def __post_init__(self) -> None:
        for name in ("damping", "clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be positive, got {value}")
        if not self.prior >= 0:
            raise ConfigError(f"prior is a precision and must not be negative, got {self.prior}")

    @property
    def name(self) -> str:
        """With the letter of the inference, as in the papers' tables."""
        return f"{type(self).__name__}({self.infer.letter})"

    def start(self, task: Task, info: Info) -> Believed:
        """What all examples are worth unseen, around the initial weights, times the prior."""
        examples = info.examples.to(info.initial).view(1)
        q = self.before(info.initial) * self.infer.site(info.initial, examples)
        return Believed(q, _inherited(info.before, q, self.server.start(q)))

    def before(self, like: Tensor) -> Gaussian:
        """p₀, with the shape of `like`."""
        return Gaussian(like.new_zeros(like.shape), like.new_full((1,), self.prior))

    def message(self, server: Believed, ids: object) -> Gaussian:
        """The global posterior."""
        return server.q

    def damped(self, delta: Gaussian, cohort: Cohort) -> Gaussian:
        """Δ^δ, clipped first."""
        delta = delta if self.clip is None else delta.clip(self.clip)
        return delta ** (self.damping or 1 / cohort.round_size)

    def fuse(self, server: Believed, update: Gaussian) -> Believed:
        """A server step along the product of the Δ_k."""
        q, memory = self.server.step(server.q, update, server.memory)
        return Believed(q, memory) if q.full else _without_overshoot(server.q, update, q, memory)

    def posterior(self, server: Believed) -> Gaussian:
        """q."""
        return server.q


def _without_overshoot(before: Gaussian, update: Gaussian, after: Gaussian, memory: Moments) -> Believed:
    """An optimiser's momentum may carry a precision past zero, where there is no mean. A coordinate that would keep
    less than a tenth of its precision, and less than the factors themselves would leave it, stays where it was and
    forgets its momentum; counted."""
    plain = before.lam + update.lam
    refused = (after.lam < before.lam / 10) & ((plain <= 0) | (after.lam < plain))
    guards.count("overshoot refused", refused)
    q = Gaussian(torch.where(refused, before.eta, after.eta), torch.where(refused, before.lam, after.lam))
    first = tree_map(lambda m: m.masked_fill(refused, 0), memory.first)
    return Believed(q, Moments(first, memory.second))


def _inherited(before: object, q: Gaussian, fresh: Moments) -> Moments:
    """The squares that an adaptive optimiser has seen on weights, for one on natural parameters: while Λ stands still
    Δη = Λ Δθ, so v ← Λ² v. Without them its first steps would be huge. Velocity is not carried over: FedAvg's steps
    are far longer than those of clients that a cavity holds, and would go on as a wrong push for many rounds."""
    if not isinstance(before, Averaged) or before.memory.second is None or q.full:
        return fresh
    seen = Gaussian(before.memory.second.theta * q.lam.square(), torch.zeros_like(q.lam))
    return carry_over(Moments(None, seen), fresh)
