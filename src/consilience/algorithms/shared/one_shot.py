"""One-shot learning: clients train their own networks, and the server sees them one by one."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.core.records import Addressed, record
from consilience.data.cohort import Cohort
from consilience.optim import AMSGrad, Chain
from consilience.tasks.task import Task

TRAIN = AMSGrad(lr=0.01, epochs=10, batch_size=32, weight_decay=1e-6)  # as in the one-shot literature, on MNIST


@record
class Message:
    """Weights to continue from, θ [K, P], where `known` [K, 1] is 1; other clients draw their own."""

    theta: Tensor
    known: Tensor


@record
class Update:
    """Trained weights θ [K, P], numbers of examples by class [K, C] (None without classes, or if the method does not
    need them), and client ids [K]."""

    theta: Tensor
    labels: Tensor | None
    client: Tensor

    @property
    def shares(self) -> Tensor | None:
        """Each client's share of the examples of each class, n_jc / n_c."""
        return None if self.labels is None else self.labels / self.labels.sum(0).clamp_min(1)


class OneShot(Algorithm):
    """Clients train from their own initial weights, or from weights that the server sends. Subclasses define what the
    server makes of the networks."""

    additive: ClassVar[bool] = False
    train: Chain

    @property
    def sends_labels(self) -> bool:
        """Whether clients send their numbers of examples by class."""
        return True

    @abstractmethod
    def starts(self, server: Any, ids: Tensor) -> Message:
        """The weights that the clients `ids` continue from."""

    def check(self, task: Task, theta: Tensor, x: Tensor) -> None:
        """Refuse a network that this method cannot handle, before any training: θ [P], and some inputs."""

    def message(self, server: Any, ids: Tensor) -> Addressed:
        return Addressed(None, self.starts(server, ids))

    def local(self, task: Task, message: Addressed, state: None, cohort: Cohort) -> tuple[Any, None]:
        theta = started(task, message, cohort)
        x = cohort.glimpse()
        self.check(task, theta[0], x)
        labels = cohort.label_counts(task.predict(theta[0], x).shape[-1]) if self.sends_labels else None
        trained = self.train(task, theta, cohort)
        return Update(trained, labels, cohort.ids.to(trained.device, copy=True)), None


def started(task: Task, message: Addressed, cohort: Cohort) -> Tensor:
    """The weights [K, P] that clients begin with: those of the message, or their own initial ones."""
    start: Message = message.own
    return torch.where(start.known > 0, start.theta, own_start(task, cohort))


def own_start(task: Task, cohort: Cohort) -> Tensor:
    """Every client's own initial weights [K, P]: weight matrices are drawn with the mean and standard deviation that
    they have in the module; vectors (biases) are copied."""
    initial = task.initial()
    parts = list(
        zip(initial.split_with_sizes([shape.numel() for shape in task.main.shapes]), task.main.shapes, strict=True)
    )
    centre = torch.cat([part.mean().expand_as(part) if len(shape) > 1 else part for part, shape in parts])
    spread = torch.cat(
        [part.std(correction=0).expand_as(part) if len(shape) > 1 else torch.zeros_like(part) for part, shape in parts]
    )
    return centre + spread * cohort.noise(len(cohort), len(initial), tag="start")
