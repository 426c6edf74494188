"""FedBN: the layers with statistics of a batch stay at the clients (Li et al., 2021)."""

from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.parts import KeepsParts, places
from consilience.core import TaskError
from consilience.tasks.task import Task


@algorithm
class FedBN(KeepsParts):
    """FedAvg on all weights but those of BatchNorm layers, whose scale, shift and statistics stay at the client.

    Every client predicts with its own norm layers, so the clients' models are tested, and not one of the server."""

    def adapt(self, task: Task, seed: int) -> Task:
        if not task.layout.main.batchnorms:
            raise TaskError("FedBN keeps BatchNorm layers at the clients, and the module has none: use FedAvg")
        return task.averaging()

    def kept(self, task: Task) -> Tensor:
        return places(task, tuple(task.main.batchnorms))
