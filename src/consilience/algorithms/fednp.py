"""FedNP: a small latent z tells each client about the other clients' data (Wu et al., 2023)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared import averaging
from consilience.algorithms.shared.averaging import Averaging, change
from consilience.algorithms.shared.factors import gap_to_product
from consilience.core import Gaussian, Point, Weighted, keys, record
from consilience.core.checks import Count, NonNegative, Positive, Share
from consilience.core.ranges import Range, Ranges
from consilience.data import Batch, Cohort, Info
from consilience.inference import sigmoid_moments, sigmoid_site
from consilience.inference.latent import LEAST, kl_to_standard, kl_to_weights, layer_weights
from consilience.models.npn import npn
from consilience.tasks.layout import MAIN
from consilience.tasks.task import Task

Parts = dict[str, Tensor]  # the weights of each network
SIGNAL, NETWORK = "signal", "npn"  # names of the two networks that are appended to the user's
AT_ONCE = 100  # examples in one pass without gradients, at least


@record
class Server(averaging.Server):
    """The belief q(z), beside FedAvg's state for the weights of all three networks."""

    q: Gaussian


@record
class Message:
    """The weights and q(z)."""

    model: Point
    q: Gaussian


@record
class Update:
    """The change of the weights, and the quotient of the client's new site and its old one."""

    change: Weighted
    site: Gaussian


@record
class Client:
    """The client's site q_k(z) [K, d]."""

    site: Gaussian


@algorithm
class FedNP(Averaging):
    """q(z) = p₀(z) Π_k q_k(z), where z [d] describes all clients' data, p₀ = N(0, 1), and q_k is client k's site.

    A client's likelihood of z is Π_i σ(f_i z_i), with f = bound · tanh(mean over examples of a linear map of features).
    cavity q₋ₖ = q / q_k; tilted q̂ ≈ Π σ(f_i z_i) q₋ₖ, from the same cavity at every step. A natural-parameter network
    maps q̂ to a Gaussian N(μ, v) over the weights W of a layer, the last linear one unless `layer` names another:

        loss + λ { mean_i KL(N(μ_i, v_i) ‖ N(W_i, ε)) + Σ_j KL(q̂_j ‖ N(0, 1)) },    λ = strength, ε = epsilon.

    Once a round q_k ← q_k^(1−δ) (tilted / cavity)^δ, with f over all of the client's data. The weights of all three
    networks are averaged as in FedAvg. `damping` is δ; None is 1/K for the K clients of a round. The paper has δ = 1:
    then all sites respond to the same q at once, and q oscillates."""

    ranges: ClassVar[Ranges] = {"strength": Range(1e-3, 1.0)}
    strength: NonNegative = 0.01
    epsilon: Positive = 1.0
    latent: Count = 10
    hidden: Count = 10
    layer: str | None = None
    bound: Positive = 3.0
    damping: Share | None = None

    def adapt(self, task: Task, seed: int) -> Task:
        task.need_labels()
        predicted, head = layer_weights(task, self.layer), task.module.get_submodule(str(task.main.head))
        with keys.seeded(seed, purpose="networks"):
            signal = self.signal(int(head.in_features))  # type: ignore[arg-type]
            network = npn(self.latent, self.hidden, predicted.stop - predicted.start)
        return task.extend(**{SIGNAL: signal, NETWORK: network})

    def start(self, task: Task, info: Info) -> Server:
        base, zeros = super().start(task, info), info.initial.new_zeros(self.latent)
        return Server(base.model, base.memory, Gaussian(zeros, zeros + 1))

    def client(self, task: Task, info: Info, n: Tensor) -> Client:
        zeros = info.initial.new_zeros(len(n), self.latent)
        return Client(Gaussian(zeros, zeros.clone()))

    def message(self, server: Server, ids: Tensor) -> Message:
        return Message(server.model, server.q)

    def signal(self, features: int) -> nn.Module:
        """The network of f, from what `evidence` returns for an example to R^d."""
        return nn.Sequential(nn.Linear(features, self.latent))

    def evidence(self, features: Tensor, losses: Tensor) -> Tensor:
        """The input of the network of f for each example [B, ...]."""
        return features

    def f(self, output: Tensor) -> Tensor:
        """f [..., d] from the mean over examples of its network's output [..., d]."""
        return self.bound * output.tanh()

    def forward(self, task: Task, parts: Parts, batch: Batch, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """One client's (mean output of the network of f [d], losses [B]); without a key there is no dropout."""
        features, output = task.features_one(parts[MAIN], batch.x, key, batch.w)
        losses = task.likelihood.losses(output, batch.y)
        return batch.mean(task.call_one(SIGNAL, parts[SIGNAL], self.evidence(features, losses), exact=True)), losses

    def loss(self, task: Task, theta: Tensor, batch: Batch, mean: Tensor, var: Tensor) -> Tensor:
        """One client's loss, for a cavity with this mean and variance [d]."""
        parts = task.split(theta)
        output, losses = self.forward(task, parts, batch, batch.key)
        m, s = sigmoid_moments(self.f(output), mean, var)  # tilted
        mu, v = task.call_one(NETWORK, parts[NETWORK], m, s, exact=True)
        w = parts[MAIN][layer_weights(task, self.layer)]
        value: Tensor = batch.mean(losses) + self.strength * (
            kl_to_weights(mu, v, w, self.epsilon) + kl_to_standard(m, s)
        )
        return value

    def signal_of(self, task: Task, theta: Tensor, batch: Batch) -> Tensor:
        """The mean output of the network of f, without dropout."""
        return self.forward(task, task.split(theta), batch, None)[0]

    def local(self, task: Task, message: Message, state: Client, cohort: Cohort) -> tuple[Update, Client]:
        w = message.model.theta
        cavity = message.q / state.site
        trained = self.train(task, w, cohort, cavity.mean, cavity.variance, loss=self.loss)
        output = cohort.mean(task.vectorize(self.signal_of), trained, max(self.train.batch_size, AT_ONCE))
        share = self.damping or 1 / cohort.round_size
        site = state.site ** (1 - share) * sigmoid_site(self.f(output), cavity) ** share
        update = Update(change(trained, w, cohort.n), site / state.site)
        return update, self.follow(state, update)

    def follow(self, state: Client, update: Update) -> Client:
        return Client(state.site * update.site)

    def swap(self, server: Server, old: Client, new: Client) -> Server:
        return replace(server, q=server.q * (new.site / old.site))

    def fuse(self, server: Server, update: Update) -> Server:
        moved: Server = super().fuse(server, update.change)
        return replace(moved, q=server.q * update.site)

    def weights(self, task: Task, server: Server) -> Gaussian:
        """N(μ, v), the prediction of W from q(z); `task` as `adapt` returned it."""
        mu, v = task.call_one(NETWORK, server.model.theta, server.q.mean, server.q.variance, exact=True)
        return Gaussian.of(mu.detach(), 1 / v.detach().clamp_min(LEAST * self.epsilon))

    def facts(self, server: Server) -> dict[str, float]:
        return {"z_mean": float(server.q.mean.mean()), "z_sd": float(server.q.variance.sqrt().mean())}

    def audit(self, server: Server, states: Iterable[Client]) -> dict[str, float]:
        p0 = Gaussian(torch.zeros_like(server.q.eta), torch.ones_like(server.q.lam))
        return {"q_apart_from_sites": gap_to_product("q(z)", server.q, p0, (group.site for group in states))}
