"""FedPer: a shared body, and a head for every client (Arivazhagan et al., 2019)."""

from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.parts import KeepsParts, last_layer, places
from consilience.tasks.task import Task


@algorithm
class FedPer(KeepsParts):
    """FedAvg on all weights but those of `parts`, which stay at the client. Body and head train together.

    `parts` are names of modules or parameters; None is the last linear layer."""

    parts: tuple[str, ...] | None = None

    def adapt(self, task: Task, seed: int) -> Task:
        self.kept(task)
        return task

    def kept(self, task: Task) -> Tensor:
        return places(task, last_layer(task, self.name) if self.parts is None else self.parts)
