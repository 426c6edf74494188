"""FedLangevin: averaged Langevin dynamics with control variates (Vono et al., 2022; Plassier et al., 2023)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.shared.averaging import change
from consilience.algorithms.shared.corrections import gap_to_mean
from consilience.core import Count, Gaussian, Mixture, NonNegative, Point, Range, Ranges, Size, Weighted, record
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGLD
from consilience.tasks.task import Task


@record
class Server:
    """The weights w, the sum c of all control variates, the numbers of clients, of all examples and of rounds so far
    [1], and the last samples [keep, P]."""

    model: Point
    c: Tensor
    clients: Tensor
    examples: Tensor
    rounds: Tensor
    kept: Tensor


@record
class Message:
    """The weights w, the sum c of all control variates, and the numbers of clients and of all examples [1]."""

    w: Tensor
    c: Tensor
    clients: Tensor
    examples: Tensor


@record
class Update:
    """n_k (w_k − w) with n_k, and the change of c_k."""

    w: Weighted
    c: Tensor


@record
class Client:
    """The control variate c_k: the gradient of the loss of all the client's examples at the weights that it last
    received."""

    c: Tensor


@algorithm
class FedLangevin(Algorithm):
    """Samples of the posterior p(θ|D) ∝ N(θ; 0, 1/prior) Π p(D_k|θ). Clients take steps of `SGLD` from w,

    θ ← θ − lr (∇f_k(θ) − c_k/n_k + c/N + prior · θ/N) + √(2 lr T/n_k) ξ, with f_k the mean loss of an example;
    w ← w + Σ p_k (θ_k − w), p_k = n_k/Σ n; c_k ← n_k ∇f_k(w), c = Σ c_k, N examples in all.

    The mean of the clients' noises is that of the pooled data, √(2 lr T/N) ξ. So w after each round is a sample for
    small steps; with one full-batch step a round it is Langevin dynamics on the pooled data. The control variates c_k
    keep several steps from drifting to the clients' own minima, for one more pass over the data; without `variates` it
    is FedAvg of SGLD. Where fewer clients take part, their noise is scaled by their share, as if all were of one size.

    The posterior is the last `keep` samples, one every `thin` rounds after `burn_in`, which predict together."""

    by_gradients: ClassVar[bool] = True
    ranges: ClassVar[Ranges] = {"prior": Range(0.1, 100.0)}
    train: SGLD = SGLD(lr=0.1)
    prior: NonNegative = 1.0
    variates: bool = True
    burn_in: Size = 0
    thin: Count = 1
    keep: Count = 10

    def start(self, task: Task, info: Info) -> Server:
        w = info.initial
        clients, examples = (number.to(w).view(1) for number in (info.clients, info.examples))
        kept = w.new_zeros(self.keep, len(w))
        return Server(Point(w), torch.zeros_like(w), clients, examples, torch.zeros_like(clients), kept)

    def client(self, task: Task, info: Info, n: Tensor) -> Client:
        return Client(info.initial.new_zeros(len(n), len(info.initial)))

    def message(self, server: Server, ids: Tensor) -> Message:
        return Message(server.model.theta, server.c, server.clients, server.examples)

    def local(self, task: Task, message: Message, state: Client, cohort: Cohort) -> tuple[Update, Client]:
        w, n = message.w, cohort.n
        share = cohort.round_size / float(message.clients)
        sampler = replace(self.train, temperature=self.train.temperature * share)
        correction = Gaussian(state.c / n - message.c / message.examples, self.prior / message.examples)
        update = Update(change(sampler(task, w, cohort, prior=correction), w, n), torch.zeros_like(state.c))
        if self.variates:
            slope = cohort.mean(task.gradient(), w.expand(len(cohort), -1), self.train.batch_size)
            update = replace(update, c=n * slope - state.c)
        return update, self.follow(state, update)

    def follow(self, state: Client, update: Update) -> Client:
        return Client(state.c + update.c)

    def swap(self, server: Server, old: Client, new: Client) -> Server:
        return replace(server, c=server.c + new.c - old.c)

    def fuse(self, server: Server, update: Update) -> Server:
        w, rounds, kept = server.model.theta + update.w.mean.theta, server.rounds + 1, server.kept
        if self._samples(int(rounds)) > self._samples(int(server.rounds)):
            kept = torch.cat([kept[1:], w.unsqueeze(0)])
        return replace(server, model=Point(w), c=server.c + update.c, rounds=rounds, kept=kept)

    def _samples(self, rounds: int) -> int:
        """The number of samples after as many rounds."""
        return max(rounds - self.burn_in, 0) // self.thin

    def posterior(self, server: Server) -> Mixture:
        count = min(self._samples(int(server.rounds)), self.keep)
        return Mixture.of(server.kept[-count:] if count else server.model.theta.unsqueeze(0))

    def audit(self, server: Server, states: Iterable[Client]) -> dict[str, float]:
        return {"c_apart_from_clients": gap_to_mean("c/K", server.c / server.clients, (group.c for group in states))}
