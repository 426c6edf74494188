"""FedLA: online Laplace approximation, means weighted by Fisher information (Liu et al., 2021)."""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.core import Gaussian, Range, Ranges, Weighted, guards, record
from consilience.core.checks import Count, Positive, Proportion
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGD, Chain
from consilience.tasks.task import Task


@record
class Server:
    """The weights w and their precision Λ, a mean over examples, [P] both; 1 + λ + λ² + … with a term for every round
    so far [1]; and the number of all examples [1]."""

    w: Tensor
    precision: Tensor
    rounds: Tensor
    examples: Tensor


@record
class Message:
    """w and Λ."""

    w: Tensor
    precision: Tensor


@record
class Update:
    """F_k and Λ_k (w_k − w), [K, P] both."""

    fisher: Tensor
    pull: Tensor


@algorithm
class FedLA(Algorithm):
    """Clients minimise loss + λ/2 (θ − w)ᵀΛ(θ − w) and return N(w_k, Λ_k⁻¹) with Λ_k = λΛ + F_k: the precision of their
    prior, and the diagonal Fisher information of an example at w_k (plus weight decay, which curves the loss as well).
    The server multiplies these Gaussians: Λ ← Σ p_k Λ_k, w ← Λ⁻¹ Σ p_k Λ_k w_k. Λ starts at 0.

    `strength` is λ. Old Fisher information fades as λ, λ², …; at 1 it never does, and the proximal term grows every
    round. `prior` is added to the clients' precisions when they weight means: where Λ is far below it, the result is
    the plain mean. λ = 0 with the same F everywhere is FedAvg. `batch_size` is the number of examples whose gradients
    are in memory at once.

    Losses and Λ are means over examples. The posterior is that of all N examples, each counted once: its precision is
    κ N (Λ / (1 + λ + λ² + …) + prior), with a term for every round so far. κ = 1 is the likelihood itself; networks
    with far more weights than data need a colder one, as in `Laplace`."""

    by_gradients: ClassVar[bool] = True
    ranges: ClassVar[Ranges] = {"strength": Range(0.01, 1.0)}
    train: Chain = SGD()
    strength: Proportion = 0.5
    prior: Positive = 1e-4
    kappa: Positive = 500.0
    batch_size: Count = 20

    def start(self, task: Task, info: Info) -> Server:
        w = info.initial
        return Server(w, torch.zeros_like(w), w.new_zeros(1), info.examples.to(w).view(1))

    def message(self, server: Server, ids: Tensor) -> Message:
        return Message(server.w, server.precision)

    def local(self, task: Task, message: Message, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        w, held = message.w, self.strength * message.precision
        trained = self.train(task, w, cohort, prior=Gaussian.of(w, held))
        fisher = cohort.mean(task.fisher, trained, self.batch_size, tag="fisher") + self.train.weight_decay
        return Weighted.of(Update(fisher, (held + fisher + self.prior) * (trained - w)), cohort.n), None

    def fuse(self, server: Server, update: Weighted) -> Server:
        found = update.mean
        precision = self.strength * server.precision + found.fisher
        guards.count("mean without precision", precision < self.prior)
        w = server.w + found.pull / (precision + self.prior)
        return replace(server, w=w, precision=precision, rounds=self.strength * server.rounds + 1)

    def posterior(self, server: Server) -> Gaussian:
        once = server.precision / server.rounds.clamp_min(1)
        return Gaussian.of(server.w, self.kappa * server.examples * (once + self.prior))
