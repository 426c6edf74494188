"""Factors: clients send Gaussian factors, the server multiplies them."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.shared import averaging
from consilience.algorithms.shared.judging import exhausting, judged, measured, stays_proper
from consilience.core import ConsilienceError, Gaussian, NonNegative, Positive, guards, record, tree_map
from consilience.data.cohort import Cohort, Info
from consilience.inference import Identity, Tilted
from consilience.server.optimizers import Moments, Momentum, ServerOptimizer, carry_over
from consilience.tasks.task import Task


@record
class Server:
    """The global posterior q and the server optimiser's memory."""

    q: Gaussian
    memory: Moments


@algorithm
class Factors(Algorithm):
    """q ← q · optimiser(Π_k Δ_k^δ), with one factor Δ_k from each client. Subclasses define `local`.

    `infer` finds each client's tilted distribution. `damping` is δ; None is 1/K for the K clients of a round. `clip`
    limits the length of Δ_k's natural parameters. `prior` is the precision of p₀ = N(0, 1/prior), a factor that the
    server holds: q = p₀ · Π sites.

    The server refuses an update if its tilted distribution has no positive precision, or if its site = tilted / cavity
    has more than `max_precision` times the precision of a typical client. `max_move` bounds the move of q's mean along
    any axis relative to a typical one, where moves below a standard deviation of q count as one. `max_surprise` bounds
    its root mean square over all axes, and also refuses clients that come late to a belief that has converged. None
    means no bound. See `shared.judging`."""

    excludes: ClassVar[bool] = False
    """Whether a client's cavity has no trace of its own data."""
    infer: Tilted = Identity()
    server: ServerOptimizer = Momentum()
    damping: Positive | None = None
    clip: Positive | None = None
    prior: NonNegative = 0.0
    max_precision: Positive | None = 1000.0
    max_move: Positive | None = 100.0
    max_surprise: Positive | None = None

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({self.infer.letter})"

    def start(self, task: Task, info: Info) -> Server:
        """The prior times the factor that stands for all examples before any was seen."""
        examples = info.examples.to(info.initial).view(1)
        q = self.before(info.initial) * self.infer.site(info.initial, examples)
        return Server(q, _inherited(info.before, self.server.start(q)))

    def before(self, like: Tensor) -> Gaussian:
        """p₀, with the shape of `like`."""
        return Gaussian(like.new_zeros(like.shape), like.new_full((1,), self.prior))

    def message(self, server: Any, ids: Tensor) -> Any:
        return server.q

    def damped(self, delta: Gaussian, cohort: Cohort) -> Gaussian:
        """Δ^δ, clipped first."""
        delta = delta if self.clip is None else delta.clip(self.clip)
        return delta ** self._power(cohort.round_size)

    def _power(self, round_size: int) -> float:
        return self.damping or 1 / round_size

    @abstractmethod
    def cavity(self, q: Gaussian, state: Any, share: Tensor) -> Gaussian:
        """The belief without each client, which has this `share` [K, 1] of all examples."""

    def measures(
        self, message: Any, state: Any, update: Any, *, n: Tensor, round_size: int, examples: int
    ) -> dict[str, Tensor]:
        power, cavity = self._power(round_size), self.cavity(message, state, n / examples)
        return measured(
            message,
            update,
            power,
            cavity,
            n,
            round_size=round_size,
            others=examples - n if self.excludes else None,
        )

    def refusals(self, server: Any, update: Any, measures: dict[str, Tensor]) -> dict[int, str]:
        return self._judged(measures) or exhausting(server.q, update, measures)

    def objection(self, measures: dict[str, Tensor]) -> str:
        return self._judged(measures).get(0, "")

    def _judged(self, measures: dict[str, Tensor]) -> dict[int, str]:
        """What `judged` finds, with the way out where sites and p₀ leave directions that no data determine."""
        advice = "; if the data do not determine all weights, give a prior such as prior=1.0"
        flat = not self.prior and self.infer.starts_flat
        return {row: why + advice * flat for row, why in judged(measures, **self.bounds).items()}

    def implausible(self, server: Any, update: Any) -> str:
        return "" if stays_proper(server.q, update) else "the sum of the updates would leave no positive precision"

    @property
    def bounds(self) -> dict[str, float | None]:
        """The bounds of the measures' ratios, by name."""
        return {"precision": self.max_precision, "move": self.max_move, "surprise": self.max_surprise}

    def fuse(self, server: Any, update: Any) -> Any:
        q, memory = self.server.step(server.q, update, server.memory)
        return Server(q, memory) if q.full else _without_overshoot(server.q, update, q, memory)

    def posterior(self, server: Any) -> Gaussian:
        q: Gaussian = server.q
        return q


def gap_to_product(
    name: str, q: Gaussian, prior: Gaussian, sites: Iterable[Gaussian], *, required: bool = True
) -> float:
    """The distance of q from the prior times all sites, which come in groups, relative to q's length. An error if
    `required` and it exceeds rounding. Lengths below 1e-3 count as 1e-3, because earlier rounding stays."""
    for group in sites:
        prior = prior * group.product()
    gap = float((q / prior).norm / q.norm.clamp_min(1e-3))
    if required and gap > 1e-3:
        raise ConsilienceError(f"{name} is not the product of the sites: they differ by {gap:.2g} of its length")
    return gap


def _without_overshoot(before: Gaussian, update: Gaussian, after: Gaussian, memory: Moments) -> Server:
    """Refuse, by coordinate, steps of an optimiser's momentum that carry a precision past zero.

    A coordinate that would keep less than a tenth of its precision, and less than the factors alone would leave it,
    stays as it was and its momentum is set to 0. Guards count these coordinates."""
    plain = before.lam + update.lam
    refused = (after.lam < before.lam / 10) & ((plain <= 0) | (after.lam < plain))
    guards.count("overshoot refused", refused)
    q = Gaussian(torch.where(refused, before.eta, after.eta), torch.where(refused, before.lam, after.lam))
    first = tree_map(lambda m: m.masked_fill(refused, 0), memory.first)
    return Server(q, Moments(first, memory.second))


def _inherited(before: object, fresh: Moments) -> Moments:
    """The second moments of an adaptive optimiser on weights, which are those of q's mean. Without them its first steps
    would be huge. The first moment is not taken over: FedAvg's steps are far longer than those of clients with a
    cavity, and would push q for many rounds."""
    if not isinstance(before, averaging.Server) or before.memory.second is None:
        return fresh
    return carry_over(Moments(None, before.memory.second.theta), fresh)
