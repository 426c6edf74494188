"""Ensemble: the server keeps every client's network and averages their predictions."""

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.one_shot import TRAIN, Message, OneShot, Update
from consilience.core import Mixture, TaskError, record
from consilience.data.cohort import Info
from consilience.optim import Chain
from consilience.tasks.task import Task


@record
class Server:
    """The last networks of all clients [clients, P], their numbers of examples by class if these weight them, and 1
    where a client has trained [clients, 1]."""

    theta: Tensor
    labels: Tensor | None
    known: Tensor


@algorithm
class Ensemble(OneShot):
    """p(y|x) = Σ_j w_j p_j(y|x), with equal weights; or `by_class`, where w_jc = n_jc/n_c is client j's share of the
    examples of class c. A prediction runs every client's network."""

    train: Chain = TRAIN
    by_class: bool = False

    @property
    def name(self) -> str:
        return "Ensemble by class" if self.by_class else "Ensemble"

    @property
    def sends_labels(self) -> bool:
        return self.by_class

    def adapt(self, task: Task, seed: int) -> Task:
        task.need_labels()
        if self.by_class and task.kind != "classification":
            raise TaskError(f"an ensemble by class needs class labels, but the task is {task.kind}")
        return task

    def start(self, task: Task, info: Info) -> Server:
        """The initial weights for every client; known if a method before has trained them."""
        theta = info.initial.repeat(int(info.clients), 1)
        return Server(theta, None, torch.full_like(theta[:, :1], float(info.before is not None)))

    def starts(self, server: Server, ids: Tensor) -> Message:
        return Message(server.theta[ids], server.known[ids])

    def fuse(self, server: Server, update: Update) -> Server:
        theta, known, labels = server.theta.clone(), server.known.clone(), server.labels
        theta[update.client], known[update.client] = update.theta, 1.0
        if update.labels is not None:
            labels = theta.new_zeros(len(theta), update.labels.shape[1]) if labels is None else labels.clone()
            labels[update.client] = update.labels
        return Server(theta, labels, known)

    def posterior(self, server: Server) -> Mixture:
        trained = server.known[:, 0] > 0
        if not bool(trained.any()):
            return Mixture.of(server.theta[:1])
        theta, labels = server.theta[trained], server.labels
        if not self.by_class or labels is None:
            return Mixture.of(theta)
        labels = labels[trained] + 1e-9  # equal weights for a class without examples
        return Mixture(theta, labels / labels.sum(0))
