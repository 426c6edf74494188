"""Statistics of BatchNorm layers as sums over examples, which clients add up like everything else they send."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from consilience.core import record
from consilience.core.records import add, rows
from consilience.data.cohort import Cohort
from consilience.tasks.layout import MAIN
from consilience.tasks.task import Task

PASSES = 2  # over the clients' data
BATCH = 500  # examples at once


@record
class Sums:
    """Σ 1, Σ x and Σ x² over all examples and places, for the channels of all BatchNorm layers in turn: [C] float64."""

    count: Tensor
    first: Tensor
    second: Tensor


def needs_statistics(task: Task) -> bool:
    """Whether a task has BatchNorm layers whose evaluation statistics are estimated for given weights."""
    return task.estimates


def client_sums(task: Task, theta: Tensor, cohort: Cohort) -> Sums:
    """The sums over the examples of a cohort of one client, for the weights θ [P].

    Layers before a BatchNorm layer normalise their inputs too: by the task's statistics if it has those of the clients'
    last pass (`with_sums`), or in the first pass by those of the batch."""
    networks, layers = task.networks, task.layout.main.batchnorms
    module = networks.functions[MAIN].evaluation[0]
    layer_of = {id(module.get_submodule(name).running_mean): name for name in layers}
    new = {name: theta.new_zeros(3, layer.num_features, dtype=torch.float64) for name, layer in layers.items()}
    with torch.no_grad():
        for _, batches in cohort.in_order(BATCH, "statistics"):
            batch = rows(batches, 0)
            _, seen = networks.watched(lambda: task.apply_one(theta, batch.x, w=batch.w), own=networks.estimated)  # noqa: B023
            for running_mean, _, (mean, var), count in seen:
                m, v, n = mean.double(), var.double(), count.double()
                new[layer_of[id(running_mean)]] += torch.stack([n.expand_as(m), n * m, n * (v + m.square())])
    return Sums(*torch.cat(list(new.values()), 1))


def with_sums(task: Task, sums: Sums) -> Task:
    """The task with the means and variances of all clients' examples in its BatchNorm layers."""
    count = sums.count.clamp_min(1)
    mean = sums.first / count
    var = (sums.second / count - mean.square()).clamp_min(0)
    sizes = [layer.num_features for layer in task.layout.main.batchnorms.values()]
    found: dict[str, Tensor] = {}
    parts = zip(task.layout.main.batchnorms, mean.split_with_sizes(sizes), var.split_with_sizes(sizes), strict=True)
    for name, layer_mean, layer_var in parts:
        prefix = f"{name}." if name else ""
        found |= {f"{prefix}running_mean": layer_mean, f"{prefix}running_var": layer_var}
    return task.with_statistics(found)


def estimate(ask: Callable[[Sums | None], Iterable[Sums]]) -> Sums | None:
    """All clients' statistics; None if there are no clients. `ask(total)` returns every client's sums, given all
    clients' sums of the pass before."""
    total: Sums | None = None
    for _ in range(PASSES):
        found: Sums | None = None
        for sums in ask(total):
            found = sums if found is None else add(found, sums)
        if found is None:
            return None
        total = found
    return total
