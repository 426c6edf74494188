"""FedNP: clients hear of data that they have never seen through a small latent z (Wu et al., 2023)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.shared.averaging import Server as Averaged
from consilience.algorithms.shared.averaging import continued
from consilience.core import guards, keys
from consilience.core.errors import ConfigError, ConsilienceError, TaskError, check_word, nearest
from consilience.core.gaussian import Gaussian
from consilience.core.ranges import Range, Ranges
from consilience.core.records import Point, Weighted, record
from consilience.data.batch import Batch
from consilience.data.cohort import Cohort, Info
from consilience.inference import sigmoid_moments, sigmoid_site
from consilience.inference.sigmoid_moments import How
from consilience.models.npn import npn
from consilience.optim import SGD, Chain
from consilience.server.optimizers import Momentum, ServerOptimizer
from consilience.tasks.layout import MAIN
from consilience.tasks.task import Task

Parts = dict[str, Tensor]  # weights of the user's network and of those that are appended
SIGNAL, NETWORK = "signal", "npn"  # the parts that are appended to the user's network
AT_ONCE = 100  # examples in a pass without gradients, at least
LEAST = 1e-6  # variances relative to what they are compared with
Signal = Literal["features", "losses", "nothing"]
Pool = Literal["all", "batch"]


@record
class Propagated:
    """FedAvg's state for the weights of all three networks, and the belief q(z)."""

    averaged: Averaged
    q: Gaussian


@record
class Told:
    """What clients are told: the weights, and q(z)."""

    model: Point
    q: Gaussian


@record
class Answered:
    """What clients answer: how the weights changed, and the factor by which their sites did."""

    change: Weighted
    site: Gaussian


@record
class LatentSite:
    """A client's own factor of q(z) [K, d], and its own natural-parameter network, if it keeps one."""

    factor: Gaussian
    network: Tensor | None


@algorithm
class FedNP(Algorithm):
    """q(z) = p₀ Π_k q_k(z), where z [d] stands for all clients' data and q_k is what client k's data say of it.

    A client's likelihood of z is Π_i σ(f z_i), f = bound · tanh(mean over its examples of a small network on features).
    cavity q₋ₖ = q / q_k; tilted q̂ ≈ Π σ(f z_i) q₋ₖ at every step, afresh; a natural-parameter network takes q̂ to a
    Gaussian over the weights W of a layer, N(μ, v), which W and z are drawn towards:

        loss + λ { mean_i KL(N(μ_i, v_i) ‖ N(W_i, ε)) + Σ_j KL(q̂_j ‖ N(0, 1)) }.

    Once a round q_k ← q_k^(1−δ) (tilted / cavity)^δ, with f over all of the client's data. Weights are averaged as in
    FedAvg. `damping` is δ, 1/K for the K clients of a round when None: the paper has 1, with which all sites answer the
    same q at once, and q swings from round to round.

    `signal` is what f hears: the "features" before the last linear layer, every example's "losses", or "nothing"
    (f = 0, the ablation: what is left is a learned spring on W). `pool="all"` takes the mean over f's d outputs too, as
    in the paper; then all z_i remain alike, and d says nothing. With `detach` f's network stays as it began.

    With `prior` q begins as p₀ = N(0, 1) and sites as 1; without, as in the paper, sites begin as N(0, K − 1). Either
    way cavities begin as N(0, 1). But Π_k σ(f_k z) alone is no density where all f_k have one sign: without a prior q
    runs away there, unless training brings them apart.
    """

    ranges: ClassVar[Ranges] = {"strength": Range(1e-3, 1.0)}
    train: Chain = SGD()
    server: ServerOptimizer = Momentum()
    strength: float = 0.01
    epsilon: float = 1.0
    latent: int = 10
    hidden: int = 10
    layer: str | None = None
    signal: Signal = "features"
    signal_hidden: int = 0
    pool: Pool = "batch"
    bound: float = 3.0
    moments: How = "derivative"
    detach: bool = False
    own_network: bool = False
    prior: bool = True
    damping: float | None = None

    def __post_init__(self) -> None:
        for name, low in {"strength": 0, "latent": 1, "hidden": 1, "signal_hidden": 0}.items():
            if not getattr(self, name) >= low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.damping is not None and not 0 < self.damping <= 1:
            raise ConfigError(f"damping must lie in (0, 1], got {self.damping}")
        for name in ("epsilon", "bound"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name, words in {"signal": Signal, "pool": Pool, "moments": How}.items():
            check_word(name, getattr(self, name), get_args(words))

    @property
    def name(self) -> str:
        """The ablation is a method of its own."""
        return "FedNP, f = 0" if self.signal == "nothing" else "FedNP"

    def adapt(self, task: Task, seed: int) -> Task:
        """Append the network of f and the natural-parameter network."""
        task.need_labels()
        if task.main.head is None:
            raise TaskError("FedNP needs a linear layer, whose weights it can predict, but the module has none")
        head = task.module.get_submodule(task.main.head)
        heard = int(head.in_features) if self.signal == "features" else 1  # type: ignore[arg-type]
        predicted = task.slice(parameter=self._weights(task))
        with keys.seeded(seed, purpose="networks"):
            layers: list[nn.Module] = [nn.Linear(self.signal_hidden or heard, self.latent)]
            if self.signal_hidden:
                layers = [nn.Linear(heard, self.signal_hidden), nn.Tanh(), *layers]
            network = npn(self.latent, self.hidden, predicted.stop - predicted.start)
            return task.extend(**{SIGNAL: nn.Sequential(*layers), NETWORK: network})

    def _weights(self, task: Task) -> str:
        layer = str(task.main.head) if self.layer is None else self.layer
        name = f"{layer}.weight".removeprefix(".")  # the module may be one linear layer itself, whose name is ""
        if name not in task.main.names:
            layers = [known.removesuffix(".weight") for known in task.main.names if known.endswith(".weight")]
            raise ConfigError(f"layer {layer!r} has no weights to predict; {nearest(layer, layers)}")
        return name

    def start(self, task: Task, info: Info) -> Propagated:
        """The modules' own weights, and q = N(0, 1), or the product of the sites."""
        clients = int(info.clients)
        if not self.prior and clients < 2:
            raise ConfigError("one client has no others whose sites could be its cavity: it needs prior = true")
        precision = 1.0 if self.prior else clients / (clients - 1)
        nothing = info.initial.new_zeros(self.latent)
        return Propagated(continued(info, self.server), Gaussian(nothing, nothing + precision))

    def client(self, task: Task, info: Info, n: Tensor) -> LatentSite:
        """A factor that says nothing, or its share of N(0, 1)."""
        nothing = info.initial.new_zeros(len(n), self.latent)
        precision = 0.0 if self.prior else 1 / max(int(info.clients) - 1, 1)
        network = info.initial[task.slice(NETWORK)].expand(len(n), -1).clone() if self.own_network else None
        return LatentSite(Gaussian(nothing, nothing + precision), network)

    def message(self, server: Propagated, ids: object) -> Told:
        """The weights and q(z): every client takes its own site out."""
        return Told(server.averaged.model, server.q)

    def heard(self, task: Task, parts: Parts, batch: Batch, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """One client's (output of f's network before pooling and bound, the mean over examples [d]; losses [B])."""
        features, output = task.features_one(parts[MAIN], batch.x, key)
        losses = task.likelihood.losses(output, batch.y)
        seen = features if self.signal == "features" else losses.unsqueeze(1)
        return batch.mean(task.call_one(SIGNAL, parts[SIGNAL], seen, exact=True)), losses

    def f(self, heard: Tensor) -> Tensor:
        """f [..., d] from that mean."""
        pooled = heard.mean(-1, keepdim=True).expand_as(heard) if self.pool == "all" else heard
        return self.bound * pooled.tanh()

    def tilted(self, heard: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of q̂ [d], from those of the cavity."""
        if self.signal == "nothing":
            return mean, var
        m, s = sigmoid_moments(self.f(heard.detach() if self.detach else heard), mean, var, self.moments)
        return m, torch.maximum(s, LEAST * var)  # negative where moments are "printed"

    def loss(self, task: Task, theta: Tensor, batch: Batch, mean: Tensor, var: Tensor) -> Tensor:
        """One client's loss, with what the others' data say of W."""
        parts = task.split(theta)
        heard, losses = self.heard(task, parts, batch, batch.key)
        m, s = self.tilted(heard, mean, var)
        mu, v = task.call_one(NETWORK, parts[NETWORK], m, s, exact=True)
        v = v.clamp_min(LEAST * self.epsilon)
        w = parts[MAIN][task.slice(parameter=self._weights(task))]
        spring = ((v + (mu - w).square()) / self.epsilon - 1 - (v / self.epsilon).log()).mean() / 2
        latent = (s + m.square() - 1 - s.log()).sum() / 2
        value: Tensor = batch.mean(losses) + self.strength * (spring + latent)
        return value

    def heard_plainly(self, task: Task, theta: Tensor, batch: Batch) -> Tensor:
        """What f's network makes of a batch, without dropout."""
        return self.heard(task, task.split(theta), batch, None)[0]

    def local(self, task: Task, message: Told, state: LatentSite, cohort: Cohort) -> tuple[Answered, LatentSite]:
        """Cavity, train on tilted after tilted, site."""
        w, mine = message.model.theta, task.slice(NETWORK)
        cavity = message.q / state.factor
        start = w
        if state.network is not None:
            start = w.repeat(len(cohort), 1)
            start[:, mine] = state.network
        trained = self.train(task, start, cohort, cavity.mean, cavity.variance, loss=self.loss)
        site = state.factor
        if self.signal != "nothing":
            heard = cohort.mean(task.vectorize(self.heard_plainly), trained, max(self.train.batch_size, AT_ONCE))
            found = _sound(sigmoid_site(self.f(heard), cavity, self.moments), site)
            share = self.damping or 1 / cohort.round_size
            site = site ** (1 - share) * found**share
        delta, network = trained - w, state.network
        if network is not None:
            network = trained[:, mine].clone()
            delta[:, mine] = 0
        answer = Answered(Weighted.of(Point(delta), cohort.n), site / state.factor)
        return answer, LatentSite(self.follow(state, answer).factor, network)

    def follow(self, state: LatentSite, update: Answered) -> LatentSite:
        """The site and its change; a network of the client's own stays its secret."""
        return LatentSite(state.factor * update.site, state.network)

    def swap(self, server: Propagated, old: LatentSite, new: LatentSite) -> Propagated:
        """One site in place of another."""
        return Propagated(server.averaged, server.q * (new.factor / old.factor))

    def fuse(self, server: Propagated, update: Answered) -> Propagated:
        """A server step along the mean change, and q with the new sites in place of the old ones."""
        model, memory = self.server.step(server.averaged.model, update.change.mean, server.averaged.memory)
        return Propagated(Averaged(model, memory), server.q * update.site)

    def posterior(self, server: Propagated) -> Point:
        """A point; z is another matter (`weights`)."""
        return server.averaged.model

    def weights(self, task: Task, server: Propagated) -> Gaussian:
        """What q(z) says of the layer's weights, N(μ, v); `task` as `adapt` returned it."""
        if self.own_network:
            raise ConfigError("with own_network = true only clients have a network that has learned to predict weights")
        mu, v = task.call_one(NETWORK, server.averaged.model.theta, server.q.mean, server.q.variance, exact=True)
        return Gaussian.of(mu.detach(), 1 / v.detach().clamp_min(LEAST * self.epsilon))

    def facts(self, server: Propagated) -> dict[str, float]:
        """How far q(z) has come from N(0, 1)."""
        return {"z_mean": float(server.q.mean.mean()), "z_sd": float(server.q.variance.sqrt().mean())}

    def audit(self, server: Propagated, states: Iterable[LatentSite]) -> dict[str, float]:
        """q is the prior times all sites."""
        nothing = torch.zeros_like(server.q.eta)
        product = Gaussian(nothing, nothing + float(self.prior))
        for group in states:
            product = product * group.factor.product()
        gap = float((server.q / product).norm / server.q.norm.clamp_min(1e-3))  # earlier rounding stays
        if gap > 1e-3:
            raise ConsilienceError(f"q(z) is not the product of the sites: they differ by {gap:.2g} of its length")
        return {"q_apart_from_sites": gap}


def _sound(new: Gaussian, old: Gaussian) -> Gaussian:
    """The new sites, or the old one where a client's has a negative precision (never with "derivative"); counted."""
    refused = ~(new.lam >= 0) & new.lam.isfinite()  # what is not finite goes on, and is named by the engine
    guards.count("site refused", refused)
    return Gaussian(torch.where(refused, old.eta, new.eta), torch.where(refused, old.lam, new.lam))
