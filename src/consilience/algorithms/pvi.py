"""PVI: partitioned variational inference (Bui et al., 2018; Ashman et al., 2022)."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from consilience.algorithms import fedep
from consilience.algorithms.base import algorithm
from consilience.algorithms.fedep import FedEP
from consilience.algorithms.shared.factors import Server
from consilience.core import Gaussian, NonNegative, record
from consilience.data.cohort import Cohort, Info
from consilience.inference import Tilted, Variational
from consilience.tasks.task import Task


@algorithm
class PVI(FedEP):
    """FedEP whose tilted distribution is variational: q_k = argmin E[ℓ_k] + KL(· ‖ q / t_k), t_k ← t_k (q_k / q)^δ,
    q = p₀ Π t_k. Its fixed points are stationary points of the evidence bound of the pooled data.

    All clients in each round, with the default δ = 1/K, are the synchronous server. Clients `in_turn`, in the order of
    their numbers and not at random, and one of them in a round (`cohort=1`, δ = 1), are the sequential server."""

    infer: Tilted = Variational()
    prior: NonNegative = 1.0
    in_turn: bool = False

    def turn(self, round: int, cohort: int, clients: int) -> Tensor | None:
        if not self.in_turn:
            return None
        return ((torch.arange(cohort) + (round - 1) * cohort) % clients).sort().values


@record
class Client(fedep.Client):
    """FedEP's state, and the q that the client works from."""

    seen: Gaussian


@algorithm
class AsynchronousPVI(PVI):
    """PVI whose clients work from a q of the past, as with a server that waits for nobody. A client that delivers its
    update receives the new q, and works from it until it is drawn again: its next update is as old as the rounds in
    between, and all clients' first ones are from the start. Updates of the same round arrive one after another. A
    client whose update is refused works from the same q again.

    q = p₀ Π t_k holds all the same, because updates are ratios. With `cohort=1` one client delivers in each round, with
    δ = 1: stale updates of clients with similar data can overshoot, so use a `damping` near 1/K then."""

    private_state: ClassVar[bool] = True

    def client(self, task: Task, info: Info, n: Tensor) -> Client:
        fresh = super().client(task, info, n)
        q = self.start(task, info).q
        seen = Gaussian(*(leaf.expand(len(n), *leaf.shape).clone() for leaf in (q.eta, q.lam)))
        return Client(fresh.factor, fresh.memory, seen)

    def local(self, task: Task, message: Gaussian, state: Any, cohort: Cohort) -> tuple[Gaussian, Client]:
        delta, after = super().local(task, state.seen, state, cohort)
        return delta, Client(after.factor, after.memory, message * delta)

    def follow(self, state: Any, update: Gaussian) -> Client:
        after = super().follow(state, update)
        return Client(after.factor, after.memory, state.seen)

    def estimate(self, server: Server, share: float) -> Client:
        found = super().estimate(server, share)
        return Client(found.factor, found.memory, server.q)
