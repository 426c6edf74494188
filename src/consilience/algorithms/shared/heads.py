"""Heads: the last linear layer of a network, its place in θ, and another module in its place."""

import copy

from torch import nn

from consilience.core import TaskError
from consilience.tasks.task import Task


def head_name(task: Task, method: str) -> str:
    """The name of the last linear layer, whose weight and bias must be learned."""
    name: str | None = task.main.head
    if name is None:
        raise TaskError(f"{method} replaces the last linear layer, and the module has none: end it with nn.Linear")
    if not {f"{name}.weight".lstrip("."), f"{name}.bias".lstrip(".")} <= set(task.main.names):
        raise TaskError(
            f"{method} replaces the last linear layer {name!r}: it must have a bias, and must not be frozen"
        )
    return name


def head_layer(task: Task, method: str) -> nn.Linear:
    """The last linear layer, with its initial weights."""
    layer = task.module.get_submodule(head_name(task, method))
    assert isinstance(layer, nn.Linear)
    return layer


def head_place(task: Task, method: str) -> tuple[int, int]:
    """Where the last linear layer lies in θ: its weight, then its bias."""
    name = head_name(task, method)
    weight, bias = (task.slice(parameter=f"{name}.{part}".lstrip(".")) for part in ("weight", "bias"))
    return weight.start, bias.stop


def with_head(task: Task, method: str, head: nn.Module) -> Task:
    """The task with another module in place of the last linear layer."""
    name = head_name(task, method)
    if not name:
        return task.with_module(head)
    module = copy.deepcopy(task.module)
    parent, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(parent), attribute, head)
    return task.with_module(module)
