"""Groups: the weights that have one width, or another setting, in common."""

from collections.abc import Callable

import torch
from torch import Tensor

from consilience.algorithms.shared.parts import places
from consilience.tasks.task import Task


def groups(task: Task, parts: str | tuple[str, ...]) -> tuple[Tensor, tuple[str, ...]]:
    """The group of every coordinate of θ [P], and the groups' names; [1] if there is one group.

    `parts` is "all", "kinds" (weights and biases), "layers" (by module), or names of modules and parameters. The group
    of coordinates without such a name, and of running averages of BatchNorm layers, is called "". A coordinate with two
    names belongs to the later one."""
    if isinstance(parts, tuple):
        at = torch.zeros(task.size, dtype=torch.int64, device=task.device)
        for number, part in enumerate(parts, 1):
            at[places(task, (part,))] = number
        used = at.bincount(minlength=len(parts) + 1) > 0
        found = [name for name, some in zip(("", *parts), used.tolist(), strict=True) if some]
        at = (used.cumsum(0) - 1)[at]
    else:
        networks, name_of = task.layout.parts.values(), NAMES[parts]
        each = ["" if name in network.running else name_of(name) for network in networks for name in network.names]
        found = list(dict.fromkeys(each))
        numbers = torch.tensor([found.index(name) for name in each])
        at = numbers.repeat_interleave(torch.tensor([n for network in networks for n in network.sizes])).to(task.device)
    return (at[:1] if len(found) == 1 else at), tuple(found)


def _kind(name: str) -> str:
    return "biases" if "bias" in name.rpartition(".")[2] else "weights"


NAMES: dict[str, Callable[[str], str]] = {
    "all": lambda name: "weights",
    "kinds": _kind,
    "layers": lambda name: name.rpartition(".")[0] or name,
}
