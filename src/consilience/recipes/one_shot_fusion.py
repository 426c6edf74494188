"""A federation of the one-shot table, and methods whose settings the server chooses by labelled examples."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.algorithms import PFNM, FedFisher, FedFisherKFAC
from consilience.algorithms.fedfisher import KroneckerUpdate
from consilience.algorithms.shared.one_shot import Update
from consilience.core import Belief, Point
from consilience.core.records import nbytes, tree_map
from consilience.data import Cohort, Dataset, Federation, Info
from consilience.evaluation.scores import evaluate
from consilience.optim import SGD
from consilience.runs import Run
from consilience.tasks import Classification, Task

Found = dict[str, dict[str, float]]  # scores by method and metric
PRIORS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # ε of FedFisher


@dataclass(frozen=True)
class Bench:
    """The clients' task and data, labelled examples and test data of the server, and the clients' optimiser."""

    task: Classification
    federation: Federation
    labelled: Dataset
    test: Dataset
    train: SGD
    seed: int

    def scored(self, task: Task, belief: Belief, mb: float) -> dict[str, float]:
        """Scores on test data, and what a client sends in megabytes."""
        return {**evaluate(task, belief, self.test).point, "MB up": mb}

    def best(self, results: Sequence[tuple[Task, Belief]]) -> tuple[Task, Belief]:
        """The result that predicts the server's labelled examples best, by NLL."""
        return min(results, key=lambda found: evaluate(found[0], found[1], self.labelled).point["nll"])

    def info(self, task: Task) -> Info:
        """What the server's state starts from."""
        numbers = (self.seed, len(self.federation), self.federation.examples)
        return Info(task.initial(), *map(torch.tensor, numbers))

    def cohort(self, task: Task) -> Cohort:
        """All clients, the largest first."""
        ids = self.federation.sizes.argsort(descending=True, stable=True)
        return Cohort(
            self.federation.to(task.device), ids, round=1, round_size=len(ids), seed=self.seed, dtype=task.dtype
        )


def best_fedfisher(at: Bench, task: Task, networks: Tensor) -> dict[str, float]:
    """FedFisher with the best ε, from the clients' networks [K, P] in the order of their ids."""
    cohort, start = at.cohort(task), task.initial()
    trained, results = networks[cohort.ids.to(networks.device)], list[tuple[Task, Belief]]()
    fisher = FedFisher().information(task, trained, cohort)
    for prior in PRIORS:
        method = FedFisher(prior=prior)
        update = tree_map(lambda leaf: leaf.sum(0), method.update(fisher, trained - start, cohort.n))
        results.append((task, method.posterior(method.fuse(Point(start), update))))
    return at.scored(*at.best(results), 2 * start.nbytes / 1e6)


def best_kronecker(at: Bench, task: Task, networks: Tensor) -> dict[str, float]:
    """FedFisherKFAC with the best ε."""
    cohort, start, results = at.cohort(task), task.initial(), list[tuple[Task, Belief]]()
    trained = networks[cohort.ids.to(networks.device)]
    update = KroneckerUpdate(trained - start, FedFisherKFAC().information(task, trained, cohort), cohort.n)
    for prior in PRIORS:
        method = FedFisherKFAC(prior=prior)
        results.append((task, method.posterior(method.fuse(method.start(task, at.info(task)), update))))
    return at.scored(*at.best(results), nbytes(update) / len(cohort) / 1e6)


def best_pfnm(at: Bench, ensemble: Run, methods: Sequence[PFNM], mb: float) -> dict[str, float]:
    """The best of several PFNMs of the networks that an ensemble by class keeps."""
    task, server, results = ensemble.task, ensemble.server, list[tuple[Task, Belief]]()
    networks = Update(server.theta, server.labels, torch.arange(len(server.theta)))
    for method in methods:
        fused = method.fuse(method.start(task, at.info(task)), networks)
        results.append((method.network(task, fused), method.posterior(fused)))
    return at.scored(*at.best(results), mb)
