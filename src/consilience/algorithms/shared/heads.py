"""Heads: the last linear layer of a network, its place in θ, and another module in its place."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from consilience.core import TaskError
from consilience.core.records import rows
from consilience.data.cohort import Cohort
from consilience.tasks.task import Task


def check_head(task: Task, method: str) -> None:
    """Refuse a task without a last linear layer whose weight and bias are learned."""
    name = task.main.head
    if name is None:
        raise TaskError(f"{method} replaces the last linear layer, and the module has none: end it with nn.Linear")
    if not {_parameter(name, "weight"), _parameter(name, "bias")} <= set(task.main.names):
        raise TaskError(
            f"{method} replaces the last linear layer {name!r}: it must have a bias, and must not be frozen"
        )


def head_layer(task: Task) -> nn.Linear:
    """The last linear layer, with its initial weights."""
    layer = task.module.get_submodule(str(task.main.head))
    assert isinstance(layer, nn.Linear)
    return layer


def head_place(task: Task) -> tuple[int, int]:
    """Where the last linear layer lies in θ: its weight, then its bias."""
    weight, bias = (task.slice(parameter=_parameter(str(task.main.head), part)) for part in ("weight", "bias"))
    return weight.start, bias.stop


def head_weights(task: Task, theta: Tensor) -> tuple[Tensor, Tensor]:
    """(W [C, d], b [C]) of the last linear layer in θ [P]."""
    (start, stop), (c, d) = head_place(task), head_layer(task).weight.shape
    weight, bias = theta[start:stop].split_with_sizes([c * d, c])
    return weight.view(c, d), bias


def check_returned(task: Task, theta: Tensor, cohort: Cohort, method: str) -> None:
    """Refuse a module that changes what its last linear layer returns, or that calls the layer for several vectors. The
    layer is tried with weights from −3 to 3, at which a function after it shows."""
    _, batch = next(iter(cohort.in_order(2, "head")))
    start, stop = head_place(task)
    probe = theta.clone()
    probe[start:stop] = torch.linspace(-3, 3, stop - start).to(theta)
    seen, output = task.networks.features(probe, rows(batch.x, 0), None, None)
    made = functional.linear(seen, *head_weights(task, probe))
    room = 0.05 * made.abs().max().clamp_min(1)  # for bfloat16
    same = seen.dim() == 2 and made.numel() == output.numel()
    if not same or bool((made.flatten() - output.flatten()).abs().max() > room):
        raise TaskError(
            f"{method} needs a module that returns what its last linear layer {task.main.head!r} makes of one vector "
            "for each example, and this module does something else"
        )


def with_head(task: Task, head: nn.Module) -> Task:
    """The task with another module in place of the last linear layer."""
    name = str(task.main.head)
    if not name:
        return task.with_module(head)
    module = copy.deepcopy(task.module)
    parent, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(parent), attribute, head)
    return task.with_module(module)


def _parameter(layer: str, part: str) -> str:
    return f"{layer}.{part}".lstrip(".")
