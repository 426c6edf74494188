"""The ODE ẇ = h(w) that the mean of the clients' weights follows, and its clock."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from consilience.core.errors import ConfigError, DataError, TaskError
from consilience.data import Cohort, Federation
from consilience.optim import SGD, Chain
from consilience.tasks.task import Task

Field = Callable[[Tensor], Tensor]
MAX_GRADIENTS = 2e7  # numbers in all clients' gradients: 160 MB
MAX_WORK = 2e9  # examples × parameters: about a second for one value of the field; a window needs a hundred
TOGETHER = 16384  # examples of all clients in memory at once


def mean_field(task: Task, federation: Federation, train: Chain, weights: Tensor | None = None) -> Field:
    """h(w) = −Σ p_i s_i (∇f_i(w) + weight_decay · w), s_i = c_i B_i / Σ p_j c_j B_j: the clients' mean direction.

    f_i is client i's mean loss over all its examples, B_i its number of steps in an epoch, which grows with its number
    of examples, and c_i its own factor on the step size if `train.schedule` has one. For clients of equal size this is
    −Σ p_i ∇f_i. p (`weights`) are the server's weights: uniform when None, n_k / n in FedAvg. Values are exact, in
    double precision, so this is for small models."""
    _check_field(task, federation)
    share = _weights(federation, weights) * _steps(train, federation)
    device = federation.order.device
    exact = task.prepare(device, torch.float64)
    ids = federation.sizes.argsort(descending=True, stable=True)
    cohort = Cohort(federation, ids, round=1, round_size=len(ids), seed=0, dtype=torch.float64)
    share = (share / share.sum())[ids].to(device)
    size = max(1, TOGETHER // len(ids))

    def field(w: Tensor) -> Tensor:
        theta = w.to(device, torch.float64)
        gradients = cohort.mean(exact.gradient(), theta.expand(len(cohort), -1), size)
        return -(share @ gradients + train.weight_decay * theta).cpu()

    return field


def times(train: Chain, federation: Federation, rounds: int, weights: Tensor | None = None) -> Tensor:
    """T_0 = 0, T_1, …, T_rounds: the sum of all local steps so far, averaged over clients by p (`weights`)."""
    each = drifts(train, federation, rounds) @ _weights(federation, weights)
    return torch.cat([each.new_zeros(1), each.cumsum(0)])


def drifts(train: Chain, federation: Federation, rounds: int) -> Tensor:
    """The sum of each client's steps in each round, [rounds, clients]: lr · c_i · Σ a_n over its epochs × B_i steps."""
    _check_train(train)
    batches, schedule = train.batches(federation.sizes.cpu()), train.schedule
    found = torch.empty(rounds, len(federation), dtype=torch.float64)
    for count in set(batches.tolist()):
        step = torch.arange(rounds * train.passes * count)
        factor = torch.ones(len(step), dtype=torch.float64)
        if schedule is not None:
            length = {"steps": 1, "epochs": count, "rounds": count * train.passes}[schedule.unit]
            factor = schedule.factor((step // length + 1).double())
        found[:, batches == count] = factor.view(rounds, -1).sum(1, keepdim=True)
    return train.lr * found * _own(train, federation)


def _check_field(task: Task, federation: Federation) -> None:
    if task.augment is not None:
        raise TaskError("augmentation makes the field random: make the task without augment=")
    if task.networks.has_dropout:
        raise TaskError("dropout makes the field random: set it to 0")
    if federation.steps > 1:
        raise DataError("the field of a stream changes from round to round: use a federation with one step")
    if not bool((federation.sizes > 0).all()):
        raise DataError("a client without examples has no gradient: leave it out")
    clients, work = len(federation) * task.size, federation.examples * task.size
    if clients > MAX_GRADIENTS or work > MAX_WORK:
        raise TaskError(
            f"{task.size:,} parameters are too many for the exact gradients of {len(federation):,} clients with "
            f"{federation.examples:,} examples: parameters × clients may be {MAX_GRADIENTS:.0e} and parameters × "
            f"examples {MAX_WORK:.0e}"
        )


def _check_train(train: Chain) -> None:
    if not isinstance(train, SGD) or train.momentum:
        what = f"momentum {train.momentum:g}" if isinstance(train, SGD) else type(train).__name__
        raise ConfigError(f"the ODE's clock assumes plain SGD, whose step is lr · gradient, not {what}")


def _weights(federation: Federation, weights: Tensor | None) -> Tensor:
    """p, which sums to 1."""
    p = torch.ones(len(federation), dtype=torch.float64) if weights is None else weights.detach().cpu().double()
    if p.shape != (len(federation),) or not bool((p >= 0).all()) or not 0 < float(p.sum()) < math.inf:
        raise ConfigError(f"weights must be {len(federation)} numbers, one a client, none negative")
    return p / p.sum()


def _own(train: Chain, federation: Federation) -> Tensor:
    """c_i, each client's factor on the step size."""
    own = None if train.schedule is None else train.schedule.for_clients(torch.arange(len(federation)))
    return torch.ones(len(federation), dtype=torch.float64) if own is None else own.double().cpu()


def _steps(train: Chain, federation: Federation) -> Tensor:
    """c_i B_i, to which the sum of a client's steps in a round is proportional."""
    _check_train(train)
    batches = train.batches(federation.sizes.cpu())
    if train.schedule is not None and train.schedule.unit == "steps" and len(set(batches.tolist())) > 1:
        raise ConfigError(
            "clients of different sizes that count their own steps have different schedules, and the field changes "
            "from round to round: let the schedule count epochs or rounds"
        )
    return batches.double() * _own(train, federation)
