"""FedEP: federated learning as expectation propagation (Guo et al., 2023)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.factors import Factors, Server, gap_to_product
from consilience.core import Gaussian, Positive, record
from consilience.data.cohort import Cohort, Info
from consilience.server.optimizers import Moments, Momentum, ServerOptimizer
from consilience.tasks.task import Task


@record
class Client:
    """The client's factor q_k and the memory of its optimiser."""

    factor: Gaussian
    memory: Moments


@algorithm
class FedEP(Factors):
    """q(θ) = p₀ Π_k q_k(θ): every client refines its own factor q_k against all other factors.

    cavity q₋ₖ = q / q_k; tilted ≈ p(D_k|θ) q₋ₖ; Δ = (tilted / q)^δ; q_k ← q_k · optimiser(Δ), q ← q · optimiser(Π Δ).
    `site` is the clients' optimiser; None copies the server's. A client's memory advances only when it takes part, so
    with momentum q = p₀ Π q_k need not hold exactly. With plain damping it must: `fit(debug=True)` checks it. As the
    server knows what all others say, `max_precision` is narrower than that of other methods."""

    excludes: ClassVar[bool] = True
    site: ServerOptimizer | None = None
    max_precision: Positive | None = 30.0

    def client(self, task: Task, info: Info, n: Tensor) -> Client:
        factor = self.infer.site(info.initial, n)
        return Client(factor, self._on_sites.start(factor))

    def local(self, task: Task, message: Gaussian, state: Client, cohort: Cohort) -> tuple[Gaussian, Client]:
        q = message
        cavity = self.cavity(q, state, cohort.share).informative()
        tilted = self.infer.near(task, cavity, q, cohort)
        delta = self.damped(self.infer.refinement(tilted, q), cohort)
        return delta, self.follow(state, delta)

    def cavity(self, q: Gaussian, state: Client, share: Tensor) -> Gaussian:
        return q / state.factor

    def follow(self, state: Client, update: Gaussian) -> Client:
        return Client(*self._on_sites.step(state.factor, update, state.memory))

    def swap(self, server: Server, old: Client, new: Client) -> Server:
        return replace(server, q=server.q * (new.factor / old.factor))

    def admit(self, server: Server, state: Client) -> Server:
        return replace(server, q=server.q * state.factor)

    def forget(self, server: Server, state: Client) -> Server:
        """q / q_k. The optimiser's memory, which has traces of all clients, starts anew."""
        q = server.q / state.factor
        return replace(server, q=q, memory=self.server.start(q))

    def farewell(self, state: Client) -> Gaussian | None:
        """(1 / q_k)^(1/lr), which `fuse` multiplies q by; with momentum no single update can."""
        if not isinstance(self.server, Momentum) or self.server.momentum:
            return None
        return state.factor ** (-1 / self.server.lr)

    def estimate(self, server: Server, share: float) -> Client:
        """(q / p₀)^share, as FedSEP removes it."""
        factor = (server.q / self.before(server.q.eta)) ** share
        return Client(factor, self._on_sites.start(factor))

    def audit(self, server: Server, states: Iterable[Client]) -> dict[str, float]:
        plain = isinstance(self.server, Momentum) and not self.server.momentum and self._on_sites == self.server
        sites = (group.factor for group in states)
        return {"q_apart_from_sites": gap_to_product("q", server.q, self.before(server.q.eta), sites, required=plain)}

    @property
    def _on_sites(self) -> ServerOptimizer:
        return self.site or self.server
