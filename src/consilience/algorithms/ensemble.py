"""Ensembles: every client's network is kept, and all of them predict together."""

from __future__ import annotations

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.alone import ONE_SHOT, Alone, Networks, Start
from consilience.core.beliefs import Mixture
from consilience.core.errors import TaskError
from consilience.core.records import record
from consilience.data.cohort import Info
from consilience.optim import Chain
from consilience.tasks.task import Task


@record
class Members:
    """The last networks of all clients [clients, P] and their labels, where they are known [clients, 1]."""

    theta: Tensor
    labels: Tensor | None
    known: Tensor


@algorithm
class Ensemble(Alone):
    """p(y|x) = Σ_j w_j p_j(y|x), alike for all networks; or `by_class`, where w_jc = n_jc/n_c is the share of a class's
    examples that client j holds. It predicts well, at the cost of running every client's network."""

    train: Chain = ONE_SHOT
    by_class: bool = False

    @property
    def name(self) -> str:
        """Both kinds are in the papers' tables."""
        return "Ensemble by class" if self.by_class else "Ensemble"

    def adapt(self, task: Task, seed: int) -> Task:
        """The same, if it has something to predict, and classes where it should weight by them."""
        task.need_labels()
        if self.by_class and task.kind != "classification":
            raise TaskError(f"an ensemble by class needs class labels, but the task is {task.kind}")
        return task

    def start(self, task: Task, info: Info) -> Members:
        """The module's own weights, until something better comes; after another method, its weights."""
        theta = info.initial.repeat(int(info.clients), 1)
        return Members(theta, None, torch.full_like(theta[:, :1], float(info.before is not None)))

    def starts(self, server: Members, ids: Tensor) -> Start:
        """Every client goes on from its own network."""
        return Start(server.theta[ids], server.known[ids])

    def fuse(self, server: Members, update: Networks) -> Members:
        """Keep them all."""
        theta, known, labels = server.theta.clone(), server.known.clone(), server.labels
        theta[update.client], known[update.client] = update.theta, 1.0
        if update.labels is not None:
            labels = theta.new_zeros(len(theta), update.labels.shape[1]) if labels is None else labels.clone()
            labels[update.client] = update.labels
        return Members(theta, labels, known)

    def posterior(self, server: Members) -> Mixture:
        """All networks that were trained."""
        there = server.known[:, 0] > 0
        if not bool(there.any()):
            return Mixture.of(server.theta[:1])
        theta, labels = server.theta[there], server.labels
        if not self.by_class or labels is None:
            return Mixture.of(theta)
        labels = labels[there] + 1e-9  # a class that nobody has is everybody's
        return Mixture(theta, labels / labels.sum(0))
