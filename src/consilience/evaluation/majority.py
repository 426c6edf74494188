"""The majority baseline: the accuracy of predicting, for every example, the class most frequent in training."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from consilience.data import Dataset, Federation
from consilience.evaluation.scores import Evaluation
from consilience.tasks import Supervised, Task


def with_majority(
    found: Evaluation, task: Task, train: Federation, test: Dataset | Federation, known: Mapping[int, int]
) -> Evaluation:
    """The evaluation with the accuracy of the class that is most frequent in each client's training data, overall and
    of each client. `known` maps clients of the test data to those of the training data; the others get the most
    frequent class of all clients. Unchanged if the task has no classes."""
    likelihood = task.likelihood if isinstance(task, Supervised) else None
    data = test.data if isinstance(test, Federation) else test
    if likelihood is None or not likelihood.categorical or likelihood.streams or train.data.y.dim() != 1:
        return found
    learned, tested = train.data.y.cpu().long(), data.y.cpu().long()
    overall = _most_frequent(learned[train.order.cpu()])
    if not isinstance(test, Federation):
        return replace(found, majority=float((tested == overall).double().mean()))
    shares: list[tuple[int, float]] = []
    for client in range(len(test)):
        y = tested[test.indices(client).cpu()]
        if len(y):
            own = _most_frequent(learned[train.indices(known[client]).cpu()]) if client in known else overall
            shares.append((len(y), float((y == own).double().mean())))
    clients = [{**one, "majority": share} for one, (_, share) in zip(found.clients, shares, strict=True)]
    total = sum(n for n, _ in shares)
    return replace(found, majority=sum(n * share for n, share in shares) / total, clients=clients)


def _most_frequent(y: Tensor) -> int:
    return int(torch.bincount(y).argmax())
