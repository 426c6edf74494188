"""β-PredBayes: clients' posterior predictives, between their mixture and their product (Hasan et al., 2024)."""

from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.one_shot import Message, OneShot, started
from consilience.core import Addressed, Range, Ranges, TaskError, record
from consilience.core.beliefs import Interpolated
from consilience.core.checks import Count, Proportion
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGHMC, Chain
from consilience.tasks.task import Task

TRAIN = SGHMC(lr=0.01, epochs=15, batch_size=50, weight_decay=1e-4)


@record
class Server:
    """The samples of all clients [clients, S, P], and 1 where a client has sent some [clients, 1]."""

    theta: Tensor
    known: Tensor


@record
class Update:
    """A client's samples θ [K, S, P], and client ids [K]."""

    theta: Tensor
    client: Tensor


@algorithm
class PredBayes(OneShot):
    """Every client samples networks from the posterior of its own data, and sends the last `samples` of them, one after
    each epoch of `train`. They predict p_k together, and all clients predict log p = β Σ_k log p_k + (1 − β) log (1/K)
    Σ_k p_k, scaled to sum to 1: the mixture for `beta` = 0, and for 1 the product, which takes the clients for
    independent evidence and is overconfident where they agree by their prior. `studies.fit_beta` finds β by labelled
    data, and `distil` makes one network of all.

    `train` is a sampler, or any chain whose last iterates are to stand for samples."""

    ranges: ClassVar[Ranges] = {"beta": Range(0.0, 1.0, log=False)}
    train: Chain = TRAIN
    beta: Proportion = 0.2
    samples: Count = 6

    @property
    def name(self) -> str:
        return "β-PredBayes"

    def adapt(self, task: Task, seed: int) -> Task:
        if task.kind not in ("classification", "binary", "ordinal"):
            raise TaskError(
                f"{self.name} multiplies probabilities of classes, but the task is {task.kind}: use Ensemble"
            )
        return task

    @property
    def each(self) -> int:
        """The number of samples of a client: at most one an epoch."""
        return min(self.samples, self.train.passes)

    def start(self, task: Task, info: Info) -> Server:
        theta = info.initial.repeat(int(info.clients), self.each, 1)
        return Server(theta, torch.full_like(theta[:, 0, :1], float(info.before is not None)))

    def starts(self, server: Server, ids: Tensor) -> Message:
        return Message(server.theta[ids, -1], server.known[ids])

    def local(self, task: Task, message: Addressed, state: None, cohort: Cohort) -> tuple[Update, None]:
        theta, kept = started(task, message, cohort), []
        ways = self.train.iterates(task.gradient(), theta, cohort, pace=task.pace, running=task.running)
        for epoch, sample in enumerate(ways):
            if epoch >= self.train.passes - self.each:
                kept.append(sample.clone())
        return Update(torch.stack(kept, 1), cohort.ids.to(theta.device, copy=True)), None

    def fuse(self, server: Server, update: Update) -> Server:
        theta, known = server.theta.clone(), server.known.clone()
        theta[update.client], known[update.client] = update.theta, 1.0
        return Server(theta, known)

    def posterior(self, server: Server) -> Interpolated:
        known = server.known[:, 0] > 0
        theta = (server.theta[known] if bool(known.any()) else server.theta[:1]).flatten(0, 1)
        return Interpolated(theta, theta.new_full((len(theta), 1), 1 / len(theta)), self.beta, self.each)
