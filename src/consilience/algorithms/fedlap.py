"""FedLap and FedLap-Cov: Laplace approximations as sites of ADMM (Swaroop et al., 2025)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.fedep import FedEP
from consilience.algorithms.shared.averaging import OneModel
from consilience.algorithms.shared.corrections import gap_to_mean
from consilience.core import Gaussian, NonNegative, Point, Positive, Range, Ranges, record
from consilience.data.cohort import Cohort, Info
from consilience.inference import Laplace, Tilted
from consilience.optim import SGD, Chain
from consilience.tasks.task import Task


@record
class Server:
    """The global weights w = Σ v_k, and the number K of clients."""

    model: Point
    clients: Tensor


@record
class Client:
    """The dual variable v_k: δ v_k is minus the gradient of the client's loss where it last stopped."""

    v: Tensor


@algorithm
class FedLap(OneModel):
    """Clients minimise ℓ_k(θ) + δ v_kᵀθ + δ/2 ‖θ − w‖² from w, with ℓ_k the sum of the losses of all their examples;
    v_k ← v_k + ρ (w_k − w), w = Σ v_k. The fixed point is the minimum of Σ ℓ_k + δ/2 ‖w‖².

    This is FedEP with sites that have no precision: the prior's precision δ, `prior`, is q's for ever. `damping` is ρ;
    None is 1/K for the K clients of a round, and larger values can diverge. v_k start at w/K, so that the first round
    keeps the initial weights."""

    by_gradients: ClassVar[bool] = True
    ranges: ClassVar[Ranges] = {"prior": Range(0.1, 100.0)}
    train: Chain = SGD()
    prior: Positive = 1.0
    damping: Positive | None = None

    def start(self, task: Task, info: Info) -> Server:
        return Server(Point(info.initial), info.clients.to(info.initial).view(1))

    def client(self, task: Task, info: Info, n: Tensor) -> Client:
        return Client((info.initial / info.clients).repeat(len(n), 1))

    def local(self, task: Task, message: Point, state: Client, cohort: Cohort) -> tuple[Point, Client]:
        w = message.theta
        held = Gaussian(self.prior * (w - state.v), torch.full_like(cohort.n, self.prior)) ** (1 / cohort.n)
        trained = self.train(task, w, cohort, prior=held)
        update = Point((self.damping or 1 / cohort.round_size) * (trained - w))
        return update, self.follow(state, update)

    def follow(self, state: Client, update: Point) -> Client:
        return Client(state.v + update.theta)

    def swap(self, server: Server, old: Client, new: Client) -> Server:
        return replace(server, model=Point(server.model.theta + new.v - old.v))

    def fuse(self, server: Server, update: Point) -> Server:
        return replace(server, model=Point(server.model.theta + update.theta))

    def audit(self, server: Server, states: Iterable[Client]) -> dict[str, float]:
        mean = server.model.theta / server.clients
        return {"w_apart_from_clients": gap_to_mean("w/K", mean, (group.v for group in states))}


@algorithm
class FedLapCov(FedEP):
    """FedLap with the clients' curvatures: FedEP by Laplace's approximation with the unchanged likelihood, κ = 1, and
    the diagonal Fisher information as it is. `damping` is ρ: sites' precisions V_k ← (1 − ρ) V_k + ρ n_k F_k."""

    infer: Tilted = Laplace(kappa=1.0, s0=0.01, epochs=1, clip=False)
    prior: NonNegative = 1.0

    @property
    def name(self) -> str:
        return "FedLap-Cov"
