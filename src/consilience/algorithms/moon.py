"""MOON: model-contrastive federated learning (Li et al., 2021)."""

from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.averaging import Averaging
from consilience.core import NonNegative, Point, Positive, Range, Ranges, TaskError, Weighted, record
from consilience.data import Batch, Cohort, Info
from consilience.tasks.task import Task


@record
class Client:
    """The client's last local model [K, P], and whether it has one [K, 1]."""

    theta: Tensor
    known: Tensor


@algorithm
class MOON(Averaging):
    """Clients minimise loss − μ log e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ}), a mean over
    examples. z are the features before the last linear layer: they are pulled towards the global model's and away from
    those of the client's last model. μ = 0 is FedAvg.

    z_glob and z_prev are constants, computed without dropout. A client that has not taken part before uses the global
    model as its last one: the term is then ln 2 for all weights, so its first round is FedAvg's."""

    ranges: ClassVar[Ranges] = {"mu": Range(0.1, 10.0)}
    mu: NonNegative = 1.0
    temperature: Positive = 0.5

    def adapt(self, task: Task, seed: int) -> Task:
        if task.main.head is None:
            raise TaskError("MOON compares the features before the last linear layer, but the module has no such layer")
        return task

    def client(self, task: Task, info: Info, n: Tensor) -> Client:
        return Client(info.initial.new_zeros(len(n), len(info.initial)), info.initial.new_zeros(len(n), 1))

    def loss(self, task: Task, theta: Tensor, batch: Batch, previous: Tensor, w: Tensor) -> Tensor:
        """One client's loss and contrast. The quotient is σ((cos(z, z_glob) − cos(z, z_prev))/τ)."""
        z, output = task.features_one(theta, batch.x, batch.key, batch.w)
        others = (task.features_one(other, batch.x, w=batch.w)[0] for other in (w, previous))
        like_global, like_previous = (F.cosine_similarity(z, other) for other in others)
        contrast = -F.logsigmoid((like_global - like_previous) / self.temperature)
        return batch.mean(task.likelihood.losses(output, batch.y) + self.mu * contrast)

    def local(self, task: Task, message: Point, state: Client, cohort: Cohort) -> tuple[Weighted, Client]:
        w = message.theta
        if self.mu:
            previous = torch.where(state.known > 0, state.theta, w)
            trained = self.train(task, w, cohort, previous, shared=(w,), loss=self.loss)
        else:
            trained = self.train(task, w, cohort)
        return Weighted.of(Point(trained - w), cohort.n), Client(trained, torch.ones_like(state.known))
