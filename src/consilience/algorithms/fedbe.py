"""FedBE: a Bayesian ensemble of models around the clients' mean (Chen & Chao, 2021)."""

from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.core import Gaussian, Mixture, Point, Size, record
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGD, Chain
from consilience.tasks.task import Task


@record
class Server:
    """The clients' models of a round [K, P] and their numbers of examples [K, 1]."""

    theta: Tensor
    n: Tensor

    @property
    def mean(self) -> Tensor:
        """m = Σ p_k w_k, p_k = n_k / Σ n."""
        return (self.n * self.theta).sum(0) / self.n.sum()

    @property
    def deviation(self) -> Tensor:
        """√ Σ p_k (w_k − m)², coordinate by coordinate."""
        return ((self.n * (self.theta - self.mean).square()).sum(0) / self.n.sum()).sqrt()


@record
class Update:
    """A client's model w_k and its number of examples n_k."""

    theta: Tensor
    n: Tensor


@algorithm
class FedBE(Algorithm):
    """The models w_k of a round make a Gaussian N(m, s²): m = Σ p_k w_k, s² = Σ p_k (w_k − m)², p_k = n_k / Σ n.
    m, the clients' models and `samples` draws of the Gaussian predict together, with equal weights. Draws are m + s ξ
    with the same ξ in every round; where clients agree, s = 0 and they all equal m.

    In the paper the server distils the ensemble with unlabelled data of its own, and rounds start from the result. Here
    no server has data: rounds start from m, as FedAvg's, and `distil(run, module)` makes the ensemble one network
    afterwards, on the clients' inputs or, with `replace(run, federation=…)`, on any others."""

    additive: ClassVar[bool] = False
    train: Chain = SGD()
    samples: Size = 10

    def start(self, task: Task, info: Info) -> Server:
        return Server(info.initial.unsqueeze(0), info.initial.new_ones(1, 1))

    def message(self, server: Server, ids: Tensor) -> Point:
        return Point(server.mean)

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Update, None]:
        return Update(self.train(task, message.theta, cohort), cohort.n), None

    def fuse(self, server: Server, update: Update) -> Server:
        return Server(update.theta, update.n)

    def posterior(self, server: Server) -> Mixture:
        mean = server.mean
        noise = Gaussian.of(torch.zeros_like(mean), mean.new_ones(1)).sample(self.samples)
        return Mixture.of(torch.cat([mean.unsqueeze(0), server.theta, mean + server.deviation * noise]))
