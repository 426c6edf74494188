"""FedBE: a Bayesian ensemble of models around the clients' mean (Chen & Chao, 2021)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.core.beliefs import Mixture
from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.core.records import Point, record
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGD, Chain
from consilience.tasks.task import Task


@record
class Models:
    """The clients' models of a round [K, P] and how many examples they had [K, 1]."""

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


@algorithm
class FedBE(Algorithm):
    """The models w_k of a round make a Gaussian N(m, s²): m = Σ p_k w_k, s² = Σ p_k (w_k − m)², p_k = n_k / Σ n.
    `samples` draws of it, the clients' models and m predict together, each as much as any other. Draws are m + s ξ
    with the same ξ in every round; where clients agree, s = 0 and they are all m.

    The paper goes on from a network that has learned from the ensemble, on unlabelled data of the server. Here no
    server has data: rounds go on from m, as FedAvg's, and `distil(run, module)` makes the ensemble one network
    afterwards, on the clients' inputs or, with `replace(run, federation=…)`, on any others.
    """

    additive: ClassVar[bool] = False
    train: Chain = SGD()
    samples: int = 10

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise ConfigError(f"samples must not be negative, got {self.samples}")

    def start(self, task: Task, info: Info) -> Models:
        """The module's own weights, as if one client had sent them."""
        return Models(info.initial.unsqueeze(0), info.initial.new_ones(1, 1))

    def message(self, server: Models, ids: object) -> Point:
        """m."""
        return Point(server.mean)

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Models, None]:
        """Train from m; send w_k and n_k."""
        return Models(self.train(task, message.theta, cohort), cohort.n), None

    def fuse(self, server: Models, update: Models) -> Models:
        """This round's models."""
        return update

    def posterior(self, server: Models) -> Mixture:
        """m, the clients' models, and draws from their Gaussian."""
        mean = server.mean
        noise = Gaussian.of(torch.zeros_like(mean), mean.new_ones(1)).sample(self.samples)
        return Mixture.of(torch.cat([mean.unsqueeze(0), server.theta, mean + server.deviation * noise]))
