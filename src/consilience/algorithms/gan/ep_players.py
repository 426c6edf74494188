"""EPPlayers: Bayesian GANs whose prior is made of factors from all clients (anonymous, under review at ICLR 2022)."""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.gan.players import NOISY, Players
from consilience.algorithms.shared import averaging
from consilience.core import ConsilienceError, Gaussian, Point, Weighted, record
from consilience.core.checks import NonNegative, Positive, Share
from consilience.core.ranges import Range, Ranges
from consilience.data import Cohort, Info
from consilience.optim import Chain
from consilience.tasks import Adversarial


@record
class Server(averaging.Server):
    """The networks, the optimiser's memory, and the product of all clients' sites [J, M]."""

    sites: Gaussian


@record
class Message:
    """The networks, and the product of all sites: every client divides by its own."""

    model: Point
    sites: Gaussian


@record
class Update:
    """The weighted change of the networks, and the factor by which the client's site changes [K, J, M]."""

    change: Weighted
    site: Gaussian


@algorithm
class EPPlayers(Players):
    """q(θ) = p₀(θ) Π_k q_k(θ) over the M weights of one generator and one discriminator, p₀ = N(w, `scale`²) around the
    averaged networks w: the prior of every sample of them. A client's state is its site q_k [K, J, M].

    cavity q₋ₖ = q / q_k; the client plays with a prior of weight λ = `strength` and finds the tilted q̂ (`tilt`);
    q_k ← q_k^(1−δ) (q̂ / q₋ₖ)^δ, δ = `damping`, 1/K for the K clients of a round when None. Networks are averaged as in
    FedAvg. With `history` it is EP-ProbGAN, else EP-BGAN. Subclasses define `tilt`."""

    ranges: ClassVar[Ranges] = {"strength": Range(1e-5, 1e-1), "scale": Range(0.003, 0.3)}
    train: Chain = NOISY
    history: bool = True
    strength: NonNegative = 1e-3
    scale: Positive = 0.03
    damping: Share | None = None
    components = 1

    @property
    def name(self) -> str:
        return "EP-ProbGAN" if self.history else "EP-BGAN"

    def start(self, task: Any, info: Info) -> Server:
        averaged = super().start(task, info)
        return Server(averaged.model, averaged.memory, self.flat(task, info.initial))

    def client(self, task: Adversarial, info: Info, n: Tensor) -> Gaussian:
        return self.flat(task, info.initial, len(n))

    def flat(self, task: Adversarial, w: Tensor, *clients: int) -> Gaussian:
        """Sites without information, [J, M] or [K, J, M]."""
        nothing = w.new_zeros(*clients, self.components, task.one(w).shape[-1])
        return Gaussian(nothing, nothing.clone())

    def message(self, server: Server, ids: object) -> Message:
        return Message(server.model, server.sites)

    def anchor(self, task: Adversarial, w: Tensor) -> Gaussian:
        """p₀ [M], given the averaged networks w [P]."""
        centre = task.one(w)
        return Gaussian.of(centre, torch.full_like(centre, self.scale**-2))

    def cavity(self, task: Adversarial, message: Message, site: Gaussian) -> Gaussian:
        """p₀ Π_{j≠k} q_j, [K, J, M]."""
        return self.anchor(task, message.model.theta) * (message.sites / site)

    @abstractmethod
    def tilt(self, task: Adversarial, w: Tensor, cavity: Gaussian, cohort: Cohort) -> tuple[Tensor, Gaussian]:
        """(Weights [K, P] after a round of play from w, tilted / cavity [K, J, M])."""

    def local(self, task: Adversarial, message: Message, state: Gaussian, cohort: Cohort) -> tuple[Update, Gaussian]:
        w = message.model.theta
        played, site = self.tilt(task, w, self.cavity(task, message, state), cohort)
        delta = (site / state) ** (self.damping or 1 / cohort.round_size)
        update = Update(averaging.change(played, w, cohort.n), delta)
        return update, self.follow(state, update)

    def repeated(self, task: Adversarial, cavity: Gaussian) -> Gaussian:
        """The cavity to the power λ for all samples, [K, P]: as a prior of the game."""
        return Gaussian(*(task.all(value.squeeze(-2)) for value in (cavity.eta, cavity.lam))) ** self.strength

    def follow(self, state: Gaussian, update: Update) -> Gaussian:
        return state * update.site

    def swap(self, server: Server, old: Gaussian, new: Gaussian) -> Server:
        return replace(server, sites=server.sites * (new / old))

    def fuse(self, server: Server, update: Update) -> Server:
        averaged: Server = super().fuse(server, update.change)
        return replace(averaged, sites=server.sites * update.site)

    def prior(self, task: Adversarial, server: Server) -> Gaussian:
        """q [J, M]; `task` as `adapt` returned it."""
        return self.anchor(task, server.model.theta) * server.sites

    def facts(self, server: Server) -> dict[str, float]:
        """The mean precision of all sites together, relative to p₀'s."""
        return {"sites_precision": float(server.sites.lam.mean()) * self.scale**2}

    def audit(self, server: Server, states: Iterable[Gaussian]) -> dict[str, float]:
        product = Gaussian.flat(server.sites.eta)
        for group in states:
            product = product * group.product()
        gap = float((server.sites / product).norm.sum() / server.sites.norm.sum().clamp_min(1e-3))
        if gap > 1e-3:
            raise ConsilienceError(f"the prior is not the product of the sites: they differ by {gap:.2g} of its norm")
        return {"sites_apart": gap}
