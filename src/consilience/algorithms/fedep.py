"""FedEP: federated learning as expectation propagation (Guo et al., 2023)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.natural import Believed, Natural
from consilience.core.errors import ConsilienceError
from consilience.core.gaussian import Gaussian
from consilience.core.records import record
from consilience.data.cohort import Cohort, Info
from consilience.server.optimizers import Moments, Momentum, ServerOptimizer
from consilience.tasks.task import Task


@record
class Site:
    """A client's own factor q_k, and its optimiser's memory."""

    factor: Gaussian
    memory: Moments


@algorithm
class FedEP(Natural):
    """q(θ) = p₀ Π_k q_k(θ): every client refines its own factor against everyone else's.

    cavity q₋ₖ = q / q_k; tilted ≈ p(D_k|θ) q₋ₖ; Δ = (tilted / q)^δ; q_k ← q_k · optimiser(Δ), q ← q · optimiser(Π Δ).
    `site` is the clients' optimiser, a copy of the server's when None; its memory moves on only when a client takes
    part, so with momentum q = p₀ Π q_k need not hold exactly. With plain damping it must: `fit(debug=True)` checks.
    """

    site: ServerOptimizer | None = None

    def client(self, task: Task, info: Info, n: Tensor) -> Site:
        """A factor worth n examples around the initial weights, so that q is the product of the sites."""
        factor = self.infer.site(info.initial, n)
        return Site(factor, self._on_sites.start(factor))

    @property
    def _on_sites(self) -> ServerOptimizer:
        return self.site or self.server

    def local(self, task: Task, message: Gaussian, state: Site, cohort: Cohort) -> tuple[Gaussian, Site]:
        """Cavity, tilted, Δ, site."""
        q = message
        cavity = (q / state.factor).informative()
        tilted = self.infer(task, cavity, q.mean, cohort)
        delta = self.damped(self.infer.refinement(tilted, q), cohort)
        return delta, self.follow(state, delta)

    def follow(self, state: Site, update: Gaussian) -> Site:
        """q_k · optimiser(Δ)."""
        return Site(*self._on_sites.step(state.factor, update, state.memory))

    def swap(self, server: Believed, old: Site, new: Site) -> Believed:
        """One factor in place of another; the optimiser's memory stays."""
        return Believed(server.q * (new.factor / old.factor), server.memory)

    def audit(self, server: Believed, states: Iterable[Site]) -> dict[str, float]:
        """How far q is from p₀ Π q_k, relative to its length; an error where it must be nothing."""
        product = self.before(server.q.eta)
        for group in states:
            product = product * group.factor.product()
        gap = float((server.q / product).length / server.q.length)
        plain = isinstance(self.server, Momentum) and not self.server.momentum and self._on_sites == self.server
        if plain and gap > 1e-3:
            raise ConsilienceError(f"q is not the product of the sites: they differ by {gap:.2g} of its length")
        return {"q_apart_from_sites": gap}
