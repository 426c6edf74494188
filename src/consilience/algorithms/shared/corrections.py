"""Control variates: what methods that correct clients' gradients share."""

from collections.abc import Iterable

import torch
from torch import Tensor

from consilience.core import ConfigError, ConsilienceError, Tree, tree_map
from consilience.optim import SGD, Chain


def need_plain_steps(train: Chain, name: str) -> None:
    """Refuse optimisers whose displacement is not the sum of step · gradient."""
    if not isinstance(train, SGD):
        raise ConfigError(f"{name} needs plain SGD, got {type(train).__name__}")
    if train.momentum:
        raise ConfigError(f"{name} needs plain SGD: momentum must be 0, got {train.momentum}")


def change_of_control(c: Tensor, delta: Tensor, time: Tensor) -> Tensor:
    """The change −c − Δ_k/T of c_k; 0 for a client that took no step (T = 0, as at the end of a schedule)."""
    return torch.where(time > 0, -c - delta / time, 0)


def exchanged(mean: Tree, old: Tree, new: Tree, clients: Tensor) -> Tree:
    """The mean over all clients after one of them replaced `old` by `new`."""
    return tree_map(lambda m, was, now: m + (now - was) / clients, mean, old, new)


def gap_to_mean(what: str, mean: Tensor, own: Iterable[Tensor]) -> float:
    """The distance of the server's mean from the mean of the clients' values, given in groups [K, P], relative to their
    length; an error if it exceeds rounding. Lengths below 1e-3 count as 1e-3, because earlier rounding stays."""
    total, length, count = torch.zeros_like(mean), 0.0, 0
    for group in own:
        total, length, count = total + group.sum(0), length + float(group.norm(dim=1).sum()), count + len(group)
    gap = float((mean - total / count).norm()) / max(length / count, 1e-3)
    if gap > 1e-3:
        raise ConsilienceError(f"the server's {what} is not the mean of the clients': off by {gap:.2g} of their length")
    return gap
