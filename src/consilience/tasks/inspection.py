"""A look at a task's module before a run: state and randomness that clients cannot have, and examples that mix."""

import logging

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from consilience.compute import probes
from consilience.core import ConsilienceError, TaskError
from consilience.core.records import Tree
from consilience.tasks.layout import MAIN
from consilience.tasks.task import Task

log = logging.getLogger("consilience")


def inspect(task: Task, x: Tree) -> None:
    """Run the module on a few examples x, as in evaluation and as in training. Raise a TaskError if it has state or
    draws numbers that no key determines. If it mixes the examples of a batch, `task.mixes` is set: clients are then
    computed without padding."""
    theta, network = task.initial(), task.networks.functions[MAIN]
    w = torch.ones(len(tree_leaves(x)[0]), device=task.device, dtype=task.dtype)
    key = torch.zeros((), dtype=torch.int64, device=task.device)
    with torch.no_grad():
        with probes.watch(network.evaluation[0], "in forward"):
            task.apply_one(theta, x, w=w)
        with probes.watch(network.training[0], "in forward, in training"):
            try:
                task.apply_one(theta, x, key, w)
            except ConsilienceError:
                raise
            except Exception as error:  # of any type: it is the user's module
                raise TaskError(f"{type(task.module).__name__} fails in training: {error}") from error
    w[1:] = 0  # a batch's statistics are then those of the first example, and others must not reach it

    def run(x: Tree) -> Tensor:
        leaves = [leaf for leaf in tree_leaves(task.apply_one(theta, x, key, w)) if isinstance(leaf, Tensor)]
        return torch.cat([leaf.reshape(len(w), -1) for leaf in leaves if len(leaf) == len(w)], 1)

    if probes.mixes(run, x) and not task.mixes:
        task.mixes = True
        log.info(
            "%s mixes the examples of a batch: clients are computed one by one, without padding, and predictions "
            "depend on the batch", type(task.module).__name__,
        )  # fmt: skip
