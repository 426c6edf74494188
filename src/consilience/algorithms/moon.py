"""MOON: model-contrastive federated learning (Li et al., 2021)."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.shared.averaging import Server as Averaged
from consilience.algorithms.shared.averaging import continued
from consilience.core.errors import ConfigError, TaskError
from consilience.core.ranges import Range, Ranges
from consilience.core.records import Point, Weighted, record
from consilience.data.batch import Batch
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGD, Chain
from consilience.server.optimizers import Momentum, ServerOptimizer
from consilience.tasks.task import Task


@record
class Previous:
    """Every client's last local model [K, P], once it is known [K, 1]."""

    theta: Tensor
    known: Tensor


@algorithm
class MOON(Algorithm):
    """Clients minimise loss − μ log e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ}), a mean over
    examples: features z before the last linear layer should be like the global model's, and not like those of the
    client's own last model. The server is FedAvg's; μ = 0 is FedAvg.

    z_glob and z_prev are constants, computed without dropout. A client that has not taken part before has the global
    model for its last one: the term is then ln 2 whatever the weights are, so its first round is FedAvg's.
    """

    ranges: ClassVar[Ranges] = {"mu": Range(0.1, 10.0)}
    train: Chain = SGD()
    mu: float = 1.0
    temperature: float = 0.5
    server: ServerOptimizer = Momentum()

    def __post_init__(self) -> None:
        if not self.mu >= 0:
            raise ConfigError(f"mu must not be negative, got {self.mu}")
        if not self.temperature > 0:
            raise ConfigError(f"temperature must be positive, got {self.temperature}")

    def adapt(self, task: Task, seed: int) -> Task:
        """The same, if it has features to compare."""
        if task.head is None:
            raise TaskError("MOON compares the features before the last linear layer, but the module has no such layer")
        return task

    def start(self, task: Task, info: Info) -> Averaged:
        """Everyone begins with the module's own weights."""
        return continued(info, self.server)

    def client(self, task: Task, info: Info, n: Tensor) -> Previous:
        """No last model yet."""
        return Previous(info.initial.new_zeros(len(n), len(info.initial)), info.initial.new_zeros(len(n), 1))

    def message(self, server: Averaged, ids: object) -> Point:
        """The global weights."""
        return server.model

    def loss(self, task: Task, theta: Tensor, batch: Batch, previous: Tensor, w: Tensor) -> Tensor:
        """One client's loss and contrast. The quotient is σ((cos(z, z_glob) − cos(z, z_prev))/τ)."""
        z, output = task.features_one(theta, batch.x, batch.key)
        others = (task.features_one(other, batch.x)[0] for other in (w, previous))
        like_global, like_previous = (F.cosine_similarity(z, other) for other in others)
        contrast = -F.logsigmoid((like_global - like_previous) / self.temperature)
        return batch.mean(task.losses(output, batch.y) + self.mu * contrast)

    def local(self, task: Task, message: Point, state: Previous, cohort: Cohort) -> tuple[Weighted, Previous]:
        """Train from w; send n_k (w_k − w), and keep w_k."""
        w = message.theta
        if self.mu:
            previous = torch.where(state.known > 0, state.theta, w)
            trained = self.train(task, w, cohort, previous, shared=(w,), loss=self.loss)
        else:
            trained = self.train(task, w, cohort)
        return Weighted.of(Point(trained - w), cohort.n), Previous(trained, torch.ones_like(state.known))

    def fuse(self, server: Averaged, update: Weighted) -> Averaged:
        """A server step along the mean change."""
        return Averaged(*self.server.step(server.model, update.mean, server.memory))

    def posterior(self, server: Averaged) -> Point:
        """A point."""
        return server.model
