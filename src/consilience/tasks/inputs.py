"""Whether a module takes the inputs of a data set; if not, one sentence that says why and what to do."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from consilience.core import ConsilienceError, DataError
from consilience.core.records import Tree, to, tree_map
from consilience.data import Dataset, Ragged, Rows
from consilience.data.trees import entries
from consilience.tasks.inspection import one_line
from consilience.tasks.task import Task


def tried(task: Task, data: Dataset, rows: Tensor, change: Callable[[Any], Any]) -> Any:
    """The module's output for some rows; a DataError if it cannot take them."""
    x = to(data.inputs(rows, task.dtype), task.device)
    _check_arguments(task, data, x)
    try:
        return _output(task, change(x))
    except ConsilienceError:
        raise
    except Exception as error:  # of any type: it is the user's module
        shapes = " and ".join(str(tuple(leaf.shape[1:])) for leaf in tree_leaves(x))
        what = f"the module cannot take examples of {data.name}, of shape {shapes}"
        other = _other_numbers(task, x, change) or f"make module(x[:2]) work first ({one_line(error)})"
        raise DataError(f"{what}: {other}") from error


def _output(task: Task, x: Tree) -> Any:
    w = torch.ones(len(tree_leaves(x)[0]), device=task.device, dtype=task.dtype)
    return task.apply_one(task.initial(), x, w=w)


def _check_arguments(task: Task, data: Dataset, x: Tree) -> None:
    """Compare the entries of x with the arguments of forward."""
    kind = type(task.module).__name__
    parameters = list(inspect.signature(task.module.forward).parameters.values())
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes, needs = ", ".join(names), [p.name for p in parameters if p.name in names and p.default is p.empty]
    if isinstance(x, dict):
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            for key in x.keys() - set(names):
                raise DataError(
                    f"x of {data.name} has the key {key!r}, and {kind}.forward takes {takes}: rename the key or "
                    "leave it out"
                )
        for name in needs:
            if name not in x:
                raise DataError(
                    f"{kind}.forward needs {name!r}, and x of {data.name} has the keys {', '.join(x)}: add the key, "
                    "or give the argument a default"
                )
        return
    count = len(x) if isinstance(x, tuple) else 1
    most = count if any(p.kind == p.VAR_POSITIONAL for p in parameters) else len(names)
    if not len(needs) <= count <= most:
        entry = "entry" if count == 1 else "entries"
        masks = " with its masks and lengths" if any(isinstance(part, Ragged) for _, part in entries(data.x)) else ""
        raise DataError(
            f"{kind}.forward takes {takes}, and x of {data.name}{masks} has {count} {entry}: make x a tuple, or a dict "
            "by name, with an entry for each argument"
        )


def _other_numbers(task: Task, x: Tree, change: Callable[[Any], Any]) -> str | None:
    """The way out if the module takes other numbers of the same shape."""
    zeros = tree_map(lambda leaf: torch.zeros_like(leaf, dtype=torch.int64), x)
    whole = any(not leaf.is_floating_point() for leaf in tree_leaves(x))
    real = any(leaf.is_floating_point() for leaf in tree_leaves(x))
    if whole and _works(task, tree_map(lambda leaf: leaf.to(task.dtype), x), change):
        return "whole numbers stay as they are, as token ids do, and the module needs real ones: convert x by .float()"
    if real and _works(task, zeros, change):
        return "they are real numbers, and the module needs whole ones, as token ids are: convert x by .long()"
    if whole and _works(task, _with_zeros(x), change):
        return "its whole numbers are negative or too large: an embedding needs more rows than its largest id"
    return None


def _with_zeros(x: Tree) -> Tree:
    """The inputs with 0 in place of each whole number."""
    return tree_map(lambda leaf: leaf if leaf.is_floating_point() else torch.zeros_like(leaf), x)


def _works(task: Task, x: Tree, change: Callable[[Any], Any]) -> bool:
    try:
        _output(task, change(x))
    except Exception:
        return False
    return True


def try_largest_ids(task: Task, data: Dataset, change: Callable[[Any], Any]) -> None:
    """Run the module on the rows with the smallest and the largest whole number: an embedding may have no vector for
    them, which would end a run in the middle."""
    if data.scale is not None:
        return
    for name, part in entries(data.x):
        if isinstance(part, Rows):
            continue  # all of them would have to be read
        values = part.values if isinstance(part, Ragged) else part
        if values.is_floating_point() or values.dtype in (torch.bool, torch.uint8) or not values.numel():
            continue
        flat = values.reshape(-1)
        for place in {int(flat.argmin()), int(flat.argmax())}:
            at = torch.tensor(place // max(1, values[0].numel()), device=values.device)
            row = torch.searchsorted(part.offsets, at, right=True) - 1 if isinstance(part, Ragged) else at
            x = to(data.inputs(row.view(1), task.dtype), task.device)
            try:
                _output(task, change(x))
            except Exception as error:  # of any type: it is the user's module
                if isinstance(part, Ragged) and not _works(task, _with_zeros(x), change):
                    return  # the row's length is at fault
                raise DataError(
                    f"{data.name}: {name} has the number {int(flat[place])} in row {int(row)}, which the module cannot "
                    f"take ({one_line(error)}): correct the data, or give an embedding more rows than its largest id"
                ) from error
