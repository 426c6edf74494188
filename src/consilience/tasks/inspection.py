"""A look at a task's module before a run: state and randomness that clients cannot have, examples that mix, padding."""

import logging
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from consilience.compute import probes
from consilience.core import ConsilienceError, TaskError
from consilience.core.records import Tree, to
from consilience.data import Dataset, Ragged
from consilience.data.trees import entries
from consilience.tasks.layout import MAIN
from consilience.tasks.task import Task

log = logging.getLogger("consilience")


def inspect(task: Task, x: Tree) -> None:
    """Run the module on a few examples x, as in evaluation and as in training. Raise a TaskError if it has state or
    draws numbers that no key determines. If it mixes the examples of a batch, `task.mixes` is set: clients are then
    computed without padding. A task is looked at once, with two examples or more."""
    if task.inspected:
        return
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

    task.inspected = len(w) > 1
    if probes.mixes(run, x):
        task.mixes = True
        log.info(
            "%s mixes the examples of a batch: clients are computed one by one, without padding, and predictions "
            "depend on the batch", type(task.module).__name__,
        )  # fmt: skip


def inspect_padding(task: Task, data: Dataset) -> None:
    """Run the module on the shortest row of different lengths, at its own width and with padding. Raise a TaskError if
    the outputs differ: a client's result would depend on the rows beside which an example lies in a batch.

    Beyond rounding, the width must not matter. The contents of the padding must not matter at all: they are compared
    at one width, where a module that uses its mask returns the same bits."""
    rows = {name: part for name, part in entries(data.x) if isinstance(part, Ragged)}
    if not rows:
        return
    sizes = torch.stack([part.sizes for part in rows.values()])
    shortest = torch.where((sizes > 0).all(0), sizes.sum(0), sizes.sum() + 1)
    row = int(shortest.argmin())
    lengths = dict(zip(rows, sizes[:, row].tolist(), strict=True))
    widths = {name: min(lengths[name] + 3, part.width) for name, part in rows.items()}
    if min(lengths.values()) == 0 or widths == lengths:
        return  # rows without anything, or of one length
    kind, theta = type(task.module).__name__, task.initial()
    w = torch.ones(1, device=task.device, dtype=task.dtype)
    real = {widths[name]: lengths[name] for name in sorted(rows, key=lengths.__getitem__)}

    def output(width: dict[str, int], sign: float = 0.0) -> Any:
        index = torch.tensor([row], device=data.device)
        x = data.inputs(index, task.dtype, width)
        x = to(x if not sign else _repadded(data, x, lengths, sign), task.device)
        with torch.no_grad():
            if not sign:
                return task.apply_one(theta, x, w=w)
            with probes.OtherPadding(real, sign):
                return task.apply_one(theta, x, w=w)

    try:
        alone, padded = output(lengths), output(widths)
        others = [output(widths, sign) for sign in (1.0, -1.0)]
    except ConsilienceError:
        raise
    except Exception as error:  # of any type: it is the user's module
        raise TaskError(
            f"{kind} cannot take rows of different lengths, here of {lengths} padded to {widths}, because of "
            f"{one_line(error)}: make its layers independent of the length"
        ) from error
    if not probes.reaches(alone, padded, others):
        return
    unnamed = [name for name, part in rows.items() if part.mask is None and part.lengths is None]
    how = f"give cs.Ragged of {unnamed[0]} a mask= or lengths= and use it" if unnamed else "use the mask or the lengths"
    raise TaskError(
        f"{kind} returns other numbers for an example of {data.name} if it has more padding, so that a client's "
        f"result would depend on the other rows of a batch: {how} in forward"
    )


def _repadded(data: Dataset, x: Tree, lengths: dict[str, int], sign: float) -> Tree:
    """Inputs with other real numbers in the padding. Whole numbers stay: they may index something."""
    names = dict(entries(data.x))
    if isinstance(data.x, dict):
        own = {key: lengths.get(f"x.{key}") for key in x}
        return {key: _other(leaf, own[key], sign) for key, leaf in x.items()}
    parts, found = (x if isinstance(x, tuple) else (x,)), []
    for name, part in names.items():
        further = 1 + sum(n is not None for n in (part.mask, part.lengths)) if isinstance(part, Ragged) else 1
        mine, parts = parts[:further], parts[further:]
        found += [_other(mine[0], lengths.get(name), sign), *mine[1:]]
    return tuple(found) if isinstance(x, tuple) else found[0]


def _other(leaf: Tensor, length: int | None, sign: float) -> Tensor:
    return leaf if length is None or not leaf.is_floating_point() else probes.repadded(leaf, length, sign)


def one_line(error: BaseException) -> str:
    """An error's type and the first line of its message, without a full stop."""
    text = str(error).strip()
    first = text.splitlines()[0].strip().rstrip(".:") if text else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
