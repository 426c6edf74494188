"""FedRep: first every client's own head, then the shared body (Collins et al., 2021)."""

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.fedper import FedPer
from consilience.data.cohort import Cohort
from consilience.optim import SGD, Chain
from consilience.tasks.task import Task


@algorithm
class FedRep(FedPer):
    """As FedPer, but clients train their own parts first, by `head` and with the body fixed, and then the body by
    `train` with these parts fixed."""

    head: Chain = SGD(epochs=10)

    def trained(self, task: Task, start: Tensor, cohort: Cohort) -> Tensor:
        own = torch.zeros_like(start[0]).index_fill_(0, self.kept(task), 1.0)
        ready = self.head(task, start, cohort, pace=own)
        return self.train(task, ready, cohort, pace=1 - own, first=self.head.epochs)
