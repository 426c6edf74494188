"""What methods that correct clients' slopes share: control variates, and means that must agree with their clients'."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from consilience.core.errors import ConfigError, ConsilienceError
from consilience.core.records import Point, Tree, record, tree_map
from consilience.optim import SGD, Chain


@record
class Steered:
    """Weights w and the mean c of all c_k: what clients are told. What they answer are changes of w and of c_k."""

    model: Point
    c: Tensor


def need_plain_steps(train: Chain, name: str) -> None:
    """Refuse chains whose displacement is not the sum of step · slope."""
    if not isinstance(train, SGD):
        raise ConfigError(f"{name} needs plain SGD, got {type(train).__name__}")
    if train.momentum:
        raise ConfigError(f"{name} needs plain SGD: momentum must be 0, got {train.momentum}")


def change_of_control(c: Tensor, delta: Tensor, time: Tensor) -> Tensor:
    """−c − Δ_k/T. Who took no step (T = 0, as at the end of a schedule) has met no gradient, and keeps c_k."""
    return torch.where(time > 0, -c - delta / time, 0)


def exchanged(mean: Tree, old: Tree, new: Tree, clients: Tensor) -> Tree:
    """The mean over all clients when one of them has `new` in place of `old`."""
    return tree_map(lambda m, was, now: m + (now - was) / clients, mean, old, new)


def apart(what: str, mean: Tensor, own: Iterable[Tensor]) -> float:
    """How far the server's mean is from the mean of the clients' own [K, P], given in groups, relative to their length:
    rounding, or an error. Lengths that training brings to 0 count as at least 1e-3, as earlier rounding stays."""
    total, length, count = torch.zeros_like(mean), 0.0, 0
    for group in own:
        total, length, count = total + group.sum(0), length + float(group.norm(dim=1).sum()), count + len(group)
    gap = float((mean - total / count).norm()) / max(length / count, 1e-3)
    if gap > 1e-3:
        raise ConsilienceError(f"the server's {what} is not the mean of the clients': off by {gap:.2g} of their length")
    return gap
