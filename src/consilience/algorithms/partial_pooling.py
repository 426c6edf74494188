"""PartialPooling: every client has weights of its own around a common mean."""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared import factors
from consilience.algorithms.shared.factors import Factors, gap_to_product
from consilience.algorithms.shared.groups import groups
from consilience.algorithms.shared.judging import measured
from consilience.core import ConfigError, Count, Gaussian, NonNegative, Positive, Range, Ranges, Width, record
from consilience.core.records import static
from consilience.data.cohort import Cohort, Info
from consilience.server.optimizers import Momentum
from consilience.tasks.task import Task

LARGEST = 1e12  # τ² that stands for ∞
AT_ONCE = 64  # clients whose first sites are multiplied together


@record
class Server(factors.Server):
    """q(μ), the widths τ² [G], the group of every coordinate [P] ([1] if there is one group), the number of clients
    [1], the rounds so far [1], and the names of the groups."""

    tau2: Tensor
    groups: Tensor
    clients: Tensor
    rounds: Tensor
    names: tuple[str, ...] = static()


@record
class Message:
    """q(μ) and the widths τ² [G]."""

    q: Gaussian
    tau2: Tensor


@record
class Update:
    """The change of the client's site, the statistics of the widths, Σ g² and Σ G by group [K, G], and 1 [K, 1]."""

    site: Gaussian
    squares: Tensor
    precisions: Tensor
    one: Tensor


@record
class Client:
    """The site s_k about μ, which q contains, and the likelihood's site t_k about θ_k, which stays at the client."""

    site: Gaussian
    likelihood: Gaussian


@algorithm
class PartialPooling(Factors):
    """μ ~ p₀, θ_k ~ N(μ, τ²), D_k | θ_k: a posterior for every client, for their mean, and for a client never seen.

    cavity = q / s_k; prior of θ_k = ∫ cavity(μ) N(θ_k; μ, τ²) dμ; tilted ≈ p(D_k|θ_k) · prior; t_k ← t_k · (tilted /
    (prior · t_k))^δ; s_k ← ∫ t_k(θ) N(θ; μ, τ²) dθ; q(μ) = p₀ Π s_k. τ = 0 is FedEP; τ = ∞ is every client alone with a
    flat prior.

    `tau` is τ at the start. `parts` are the groups of weights with a width of their own: "all", "kinds" (weights and
    biases), "layers", or names of modules or parameters; weights without such a name are shared, with τ = 0. With
    `learn`, widths follow the evidence after `settle` rounds, except 0 and ∞: τ² ← τ² √(Σ g² / Σ G). That needs sites
    whose precision is the data's (`Newton`, `Laplace`, `NGVI`); None learns widths if it is so. `strength` is the
    weight, in values, of a prior of τ² around `tau`²: with few clients and no prior, τ can run to 0. `max_spread`
    bounds a client's say in τ relative to a typical client's."""

    excludes: ClassVar[bool] = True
    private_state: ClassVar[bool] = True
    ranges: ClassVar[Ranges] = {"tau": Range(0.03, 3.0), "server.lr": None}
    tau: Width = 0.3
    parts: Literal["all", "kinds", "layers"] | tuple[str, ...] = "kinds"
    learn: bool | None = None
    settle: Count = 5
    strength: NonNegative = 4.0
    max_precision: Positive | None = 30.0
    max_spread: Positive | None = 1000.0

    def __post_init__(self) -> None:
        if self.server != Momentum():
            raise ConfigError(f"{self.name} needs the plain server Momentum(): sites must add up to q; use damping")
        if self.learn and not self.infer.measures_precision:
            raise ConfigError(
                f"{self.name} cannot learn tau, because the precision of its sites is a constant and not the data's: "
                "use Laplace, NGVI or Newton, or leave learn out and choose tau"
            )

    @property
    def _learns(self) -> bool:
        return self.infer.measures_precision if self.learn is None else self.learn

    def adapt(self, task: Task, seed: int) -> Task:
        groups(task, self.parts)
        return task

    def start(self, task: Task, info: Info) -> Server:
        at, names = groups(task, self.parts)
        tau2, clients = self._widths(names, info.initial), info.clients.to(info.initial).view(1)
        sizes = (info.examples / info.clients).expand(int(info.clients)) if info.sizes is None else info.sizes
        q = self.before(info.initial)
        for n in torch.split(sizes.to(info.initial).unsqueeze(1), AT_ONCE):
            q = q * self.infer.site(info.initial, n).widened(tau2[at]).product()
        return Server(q, self.server.start(q), tau2, at, clients, torch.zeros_like(clients), names)

    def client(self, task: Task, info: Info, n: Tensor) -> Client:
        at, names = groups(task, self.parts)
        tau2, likelihood = self._widths(names, info.initial)[at], self.infer.site(info.initial, n)
        if not likelihood.full:  # with as many precisions as a site, which has those of its widths
            likelihood = likelihood * Gaussian(torch.zeros_like(likelihood.eta), torch.zeros_like(tau2))
        return Client(likelihood.widened(tau2), likelihood)

    def _widths(self, names: tuple[str, ...], like: Tensor) -> Tensor:
        """τ² of every group at the start; 0 for weights that are shared."""
        return like.new_tensor([min(self.tau**2, LARGEST) if name else 0.0 for name in names])

    def message(self, server: Server, ids: Tensor) -> Message:
        return Message(server.q, server.tau2)

    def local(self, task: Task, message: Message, state: Client, cohort: Cohort) -> tuple[Update, Client]:
        at, _ = groups(task, self.parts)
        tau2 = message.tau2[at]
        prior = self._prior(message.q, state, tau2)
        own = prior * state.likelihood
        tilted = self.infer.near(task, prior, own, cohort)
        likelihood = state.likelihood * self.infer.refinement(tilted, own) ** self._power(cohort.round_size)
        change = likelihood.widened(tau2) / state.site
        change = change if self.clip is None else change.clip(self.clip)
        update = Update(change, *_evidence(prior, likelihood, at, len(message.tau2)), torch.ones_like(cohort.n))
        return update, Client(self.follow(state, update).site, likelihood)

    def _prior(self, q: Gaussian, state: Client, tau2: Tensor) -> Gaussian:
        """The prior of θ_k: what all other clients say about μ, widened by τ²."""
        return self.cavity(q, state).informative().widened(tau2)

    def cavity(self, q: Gaussian, state: Client, share: Tensor | None = None) -> Gaussian:
        return q / state.site

    def follow(self, state: Client, update: Update) -> Client:
        """The new s_k. Only the client knows t_k, and the server does not use it."""
        return Client(state.site * update.site, state.likelihood)

    def swap(self, server: Server, old: Client, new: Client) -> Server:
        return replace(server, q=server.q * (new.site / old.site))

    def admit(self, server: Server, state: Client) -> Server:
        return replace(server, q=server.q * state.site, clients=server.clients + 1)

    def forget(self, server: Server, state: Client) -> Server:
        """q / s_k. The widths, which all clients have taught, follow in later rounds."""
        return replace(server, q=server.q / state.site, clients=server.clients - 1)

    def estimate(self, server: Server, share: float) -> Client:
        """The site is the client's share of all sites; its own likelihood is not known, and taken for the same."""
        site = (server.q / self.before(server.q.eta)) ** share
        return Client(site, site)

    def measures(
        self, message: Message, state: Client, update: Update, *, n: Tensor, round_size: int, examples: int
    ) -> dict[str, Tensor]:
        """Those of the damped update, because s_k is not linear in t_k; and `spread`, the client's largest Σ g² / Σ G
        of a group, ∞ for statistics that no data give: negative ones, or G above 1/τ² in all coordinates."""
        q, tau2 = message.q, message.tau2
        found = measured(q, update.site, 1.0, self.cavity(q, state), n, round_size=round_size, others=examples - n)
        squares, precisions = update.squares, update.precisions
        impossible = (squares < 0) | (precisions < 0) | (precisions * tau2 > 1.01 * q.eta.shape[-1])
        least = torch.finfo(squares.dtype).eps ** 0.5 / tau2  # of less information, both sums are rounding errors
        ratio = squares / precisions.maximum(least)
        found["spread"] = torch.where(impossible, torch.inf, ratio * (tau2 > 0)).amax(-1)
        return found

    def refusals(self, server: Server, update: Update, measures: dict[str, Tensor]) -> dict[int, str]:
        return super().refusals(server, update.site, measures)

    def implausible(self, server: Server, update: Update) -> str:
        return super().implausible(server, update.site)

    @property
    def bounds(self) -> dict[str, float | None]:
        return {**super().bounds, "spread": self.max_spread}

    def fuse(self, server: Server, update: Update) -> Server:
        moved = super().fuse(server, update.site)
        return replace(server, q=moved.q, tau2=self._learned(server, update), rounds=server.rounds + 1)

    def _learned(self, server: Server, update: Update) -> Tensor:
        """τ² ← τ² √((Σ g² + ν τ₀²/τ⁴) / (Σ G + ν/τ²)), by at most a factor of 2. ν is the `strength` of the prior
        around τ₀ = `tau`. Both sums are scaled from the clients of the round to all clients, and the step is shortened
        by their share, so that a client alone, such as one that joins, cannot choose the widths."""
        tau2 = server.tau2
        varies = (tau2 > 0) & (tau2 < LARGEST) & (server.rounds >= self.settle)
        if not self._learns or not bool(varies.any()):
            return tau2
        share = update.one / server.clients
        wider = update.squares / share + self.strength * (self.tau / tau2).square()
        narrower = update.precisions / share + self.strength / tau2
        step = (wider / narrower).sqrt().clamp(0.5, 2.0) ** share
        return torch.where(varies, tau2 * step, tau2)

    def personal(self, server: Server, state: Client) -> Gaussian:
        return self._prior(server.q, state, server.tau2[server.groups]) * state.likelihood

    def newcomer(self, server: Server) -> Gaussian:
        """∫ q(μ) N(θ; μ, τ²) dμ."""
        return server.q.widened(server.tau2[server.groups])

    def facts(self, server: Server) -> dict[str, float]:
        """τ of every group."""
        return {
            f"tau of {name}": tau2**0.5 for name, tau2 in zip(server.names, server.tau2.tolist(), strict=True) if name
        }

    def audit(self, server: Server, states: Iterable[Client]) -> dict[str, float]:
        sites = (group.site for group in states)
        return {"q_apart_from_sites": gap_to_product("q", server.q, self.before(server.q.eta), sites)}


def _evidence(prior: Gaussian, likelihood: Gaussian, at: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Σ g² and Σ G over every group [K, `count`], with ∂ log p(D)/∂τ² = ½ Σ_k (g_k² − G_k).

    g = Λ₀ (m − m₀) with the prior's Λ₀ and m₀ and the posterior's mean m; G = diag(Λ₀ (Λ₀ + Λ_t)⁻¹ Λ_t)."""
    own = (prior * likelihood).proper()
    g, mean = prior.energy_gradient(own.mean), own.mean.abs()
    scale = (prior.lam.abs() @ mean.unsqueeze(-1)).squeeze(-1) if prior.full else prior.lam.abs() * mean
    # Of a client without information g is rounding, and Σ g² / Σ G would be that over 0.
    none = g.abs() <= 64 * torch.finfo(g.dtype).eps * (scale + prior.eta.abs())
    squares = g.masked_fill(none, 0).square()
    if own.full:
        kept = prior.lam @ torch.linalg.solve_ex(own.lam, likelihood.lam).result
        precisions = kept.diagonal(dim1=-2, dim2=-1)
    else:
        precisions = (prior.lam * likelihood.lam / own.lam).expand_as(squares)
    precisions = precisions.clamp_min(0)  # of a site with a negative precision
    at = at.expand(squares.shape[1])
    found = [squares.new_zeros(len(squares), count).index_add_(1, at, value) for value in (squares, precisions)]
    return found[0], found[1]
