"""pFedMe: personal models by Moreau envelopes (Dinh et al., 2020)."""

from typing import ClassVar

from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.averaging import Averaging, change
from consilience.core import Count, Gaussian, Point, Positive, Range, Ranges, Weighted, record
from consilience.data.cohort import Cohort, Info
from consilience.tasks.task import Task


@record
class Client:
    """The client's own model θ_k [K, P]."""

    own: Tensor


@algorithm
class PFedMe(Averaging):
    """Clients repeat `steps` times, from w_k = w: θ_k ≈ argmin loss + λ/2 ‖θ − w_k‖² by `train`; w_k ← w_k − ηλ (w_k −
    θ_k). w ← w + optimiser(mean of w_k − w), uniform over the round's clients. Known clients predict with θ_k, new ones
    with w.

    λ = `lam` and η = `lr`. λ(w_k − θ_k) is the gradient of the Moreau envelope of the client's loss. With one step, w
    goes to the minimum of the mean of the envelopes; with more, clients drift as in FedAvg. The paper's β is the `lr`
    of the server."""

    ranges: ClassVar[Ranges] = {"lam": Range(1.0, 30.0), "lr": Range(1e-3, 0.1)}
    lam: Positive = 15.0
    lr: Positive = 0.03
    steps: Count = 5

    @property
    def name(self) -> str:
        return "pFedMe"

    def client(self, task: Task, info: Info, n: Tensor) -> Client:
        return Client(info.initial.repeat(len(n), 1))

    def local(self, task: Task, message: Point, state: Client, cohort: Cohort) -> tuple[Weighted, Client]:
        w, precision = message.theta, message.theta.new_full((1,), self.lam)
        near = own = w.expand(len(cohort), -1)
        for step in range(self.steps):
            prior, first = Gaussian(self.lam * near, precision), step * self.train.epochs
            own = self.train(task, own, cohort, prior=prior, first=first)
            near = near - self.lr * self.lam * (near - own)
        return change(near, w, cohort.n.new_ones(cohort.n.shape)), Client(own)

    def personal(self, server: object, state: Client) -> Point:
        return Point(state.own)
