"""The head: the last linear layer, for methods that make it anew at the server."""

from torch import Tensor, nn

from consilience.core import TaskError
from consilience.tasks.task import Task


def learned_head(task: Task, method: str) -> str:
    """The name of the last linear layer, whose weight and bias must be learned."""
    name: str | None = task.main.head
    if name is None:
        raise TaskError(f"{method} replaces the last linear layer, and the module has none: end it with nn.Linear")
    if not {f"{name}.weight".lstrip("."), f"{name}.bias".lstrip(".")} <= set(task.main.names):
        raise TaskError(
            f"{method} replaces the last linear layer {name!r}: it must have a bias, and must not be frozen"
        )
    return name


def head_place(task: Task) -> tuple[int, int]:
    """Where the learned head lies in θ: its weight, then its bias."""
    weight, bias = (task.slice(parameter=f"{task.main.head}.{part}".lstrip(".")) for part in ("weight", "bias"))
    return weight.start, bias.stop


def head_shape(task: Task) -> tuple[int, int]:
    """(classes C, features d) of the last linear layer."""
    layer = task.module.get_submodule(str(task.main.head))
    assert isinstance(layer, nn.Linear)
    return layer.out_features, layer.in_features


def head_weights(task: Task, theta: Tensor) -> tuple[Tensor, Tensor]:
    """(W [C, d], b [C]) of the last linear layer in θ [P]."""
    (start, stop), (c, d) = head_place(task), head_shape(task)
    weight, bias = theta[start:stop].split_with_sizes([c * d, c])
    return weight.view(c, d), bias
