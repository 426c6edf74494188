"""BayesADMM: the alternating direction method of multipliers on distributions (Möllenhoff et al., 2026)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared import factors
from consilience.algorithms.shared.factors import Factors, gap_to_product
from consilience.algorithms.shared.judging import measured
from consilience.core import ConfigError, Gaussian, NonNegative, Positive, Range, Ranges, Weighted, guards, record
from consilience.data.cohort import Cohort, Info
from consilience.inference import Tilted, Variational
from consilience.tasks.task import Task


@record
class Server(factors.Server):
    """q, the optimiser's memory, T = p₀ Π t_k over all clients, and their number K [1]."""

    total: Gaussian
    clients: Tensor


@record
class Client:
    """The dual variable, as the client's site t_k."""

    site: Gaussian


@algorithm
class BayesADMM(Factors):
    """q_k ≈ [p(D_k|θ) / t_k]^(1/ρ) · q, which minimises E[ℓ_k + log t_k] + ρ KL(· ‖ q); Δ_k = q_k / q;
    t_k ← t_k · Δ_k^(γρ); T = p₀ Π t_k; q ← (q · Π Δ_k^(1/K))^(1 − α) · T^α with α = 1/(1 + Kρ).

    PVI and FedEP are ρ = α = 1. Here q is a relaxed copy of T, which it reaches at the fixed point: p₀ times all sites.
    Sites start flat, and q at p₀ times a client's factor of the initial weights. Estimates of precisions are noisy:
    where those of all sites together are negative, q relaxes to p₀'s precision around its own mean, and the entries are
    counted. `rho` is ρ: a small one lets clients move far. `damping` is γ, None is 1. The mean is uniform over the
    clients of a round. The published claims are for all clients in each round."""

    ranges: ClassVar[Ranges] = {"rho": Range(0.1, 10.0), "damping": Range(1e-3, 1.0)}
    infer: Tilted = Variational()
    rho: Positive = 1.0
    damping: Positive | None = 0.1
    prior: NonNegative = 1.0

    def __post_init__(self) -> None:
        if not self.infer.measures_precision:
            raise ConfigError(
                f"{self.name} needs an inference that measures the precision: Variational, Laplace, NGVI or Newton; "
                "with one constant precision use FedLap"
            )
        if not self.prior:
            raise ConfigError(f"{self.name} needs a prior: sites start flat, so prior must be above 0")

    def start(self, task: Task, info: Info) -> Server:
        w, clients = info.initial, info.clients.to(info.initial).view(1)
        q = self.before(w) * self.infer.site(w, info.examples.to(w).view(1) / clients)
        return Server(q, self.server.start(q), self.before(w) * self._flat(w, clients), clients)

    def client(self, task: Task, info: Info, n: Tensor) -> Client:
        return Client(self._flat(info.initial, n))

    def _flat(self, like: Tensor, n: Tensor) -> Gaussian:
        """Sites without information, in the form of the inference's."""
        site = self.infer.site(like, n)
        return site / site

    def local(self, task: Task, message: Gaussian, state: Client, cohort: Cohort) -> tuple[Weighted, Client]:
        q = message
        moved = self.infer.near(task, q**self.rho / state.site, q, cohort, power=1 / self.rho)
        delta = moved / q if self.clip is None else (moved / q).clip(self.clip)
        update = Weighted.of(delta, cohort.n.new_ones(cohort.n.shape))
        return update, self.follow(state, update)

    def cavity(self, q: Gaussian, state: Client, share: Tensor) -> Gaussian:
        return q / state.site

    def follow(self, state: Client, update: Weighted) -> Client:
        return Client(state.site * update.total**self._step)

    @property
    def _step(self) -> float:
        """γρ, the power of Δ_k in t_k."""
        return (self.damping or 1.0) * self.rho

    def swap(self, server: Server, old: Client, new: Client) -> Server:
        return replace(server, total=server.total * (new.site / old.site))

    def admit(self, server: Server, state: Client) -> Server:
        return replace(server, total=server.total * state.site, clients=server.clients + 1)

    def forget(self, server: Server, state: Client) -> Server:
        """q starts again at T without the client's site."""
        total = server.total / state.site
        return Server(total, self.server.start(total), total, server.clients - 1)

    def estimate(self, server: Server, share: float) -> Client:
        """(T / p₀)^share."""
        return Client((server.total / self.before(server.q.eta)) ** share)

    def measures(
        self, message: Gaussian, state: Client, update: Weighted, *, n: Tensor, round_size: int, examples: int
    ) -> dict[str, Tensor]:
        return measured(message, update.total, 1.0, self.cavity(message, state, n), n, round_size=1)

    def implausible(self, server: Server, update: Weighted) -> str:
        return super().implausible(server, update.mean)

    def fuse(self, server: Server, update: Weighted) -> Server:
        total, share = server.total * update.total**self._step, 1 / (1 + server.clients * self.rho)
        direction = update.mean ** (1 - share) * (self._target(total, server.q) / server.q) ** share
        moved = super().fuse(server, direction)
        return Server(moved.q, moved.memory, total, server.clients)

    def _target(self, total: Gaussian, q: Gaussian) -> Gaussian:
        """T, with p₀'s precision around q's mean where that of all sites together is negative."""
        if total.full:
            return total
        lost = total.lam < self.prior
        guards.count("precision of all sites negative", lost)
        return Gaussian(torch.where(lost, q.mean * self.prior, total.eta), total.lam.clamp_min(self.prior))

    def audit(self, server: Server, states: Iterable[Client]) -> dict[str, float]:
        sites, prior = (group.site for group in states), self.before(server.q.eta)
        return {"total_apart_from_sites": gap_to_product("T", server.total, prior, sites)}
