"""Predictions of a belief: of one network, averaged over draws of a posterior, or of an ensemble."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from consilience.core.beliefs import Belief, Mixture, draws
from consilience.core.checks import Count, check_type
from consilience.core.errors import DataError
from consilience.core.gaussian import Gaussian
from consilience.core.records import Tree, to
from consilience.data.dataset import Dataset
from consilience.data.ragged import Ragged
from consilience.data.trees import batch_of, entries, example_bytes, in_dtype, tensors, to_tree, widths
from consilience.tasks import Regression, Task

SAMPLES = 10  # draws of a posterior that predictions are averaged over
Inputs = Tensor | Ragged | npt.ArrayLike | tuple[Any, ...] | Mapping[str, Any]
"""Model inputs [N, ...]: one tensor or array, or a tuple or dict of them."""
MOST_ROWS, MOST_BYTES = 1000, 64 * 2**20  # examples, and bytes of their inputs, that are predicted at once


def batch_rows(x: Tree, dtype: torch.dtype, batch_size: int | None = None) -> int:
    """The number of examples to predict at once: `batch_size` or, by default, at most 1000 with at most 64 MiB of
    inputs in `dtype`."""
    if batch_size is not None:
        check_type("batch_size", batch_size, Count)
        return batch_size
    return max(1, min(MOST_ROWS, MOST_BYTES // max(1, example_bytes(x, dtype))))


def predict(
    task: Task, belief: Belief, data: Dataset, index: Tensor, *, samples: int = 0, batch_size: int | None = None
) -> Tensor:
    """Predictive means for rows `index`: of the mean weights, averaged over `samples` draws of the posterior, or of an
    ensemble."""
    return predict_with_variance(task, belief, data, index, samples=samples, batch_size=batch_size)[0]


def predict_with_variance(
    task: Task, belief: Belief, data: Dataset, index: Tensor, *, samples: int = 0, batch_size: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Predictive means and, for regression, their variance over networks."""
    networks, means, variances = draws(belief, samples), [], []
    for x in input_batches(task, data, index, batch_size):
        made = predict_each(task, networks, x)
        means.append(networks.combine(made))
        if isinstance(task, Regression):
            variances.append(_variance(belief, networks, made))
    return torch.cat(means), torch.cat(variances) if variances else None


def input_batches(task: Task, data: Dataset, index: Tensor, batch_size: int | None = None) -> Iterator[Tree]:
    """The inputs of rows `index`, batch by batch. If the targets are Ragged, all batches have the width of the longest
    row, so that predictions for each place can be joined."""
    width = data.widths if any(isinstance(part, Ragged) for _, part in entries(data.y)) else None
    for rows in torch.split(index.to(data.device), batch_rows(data.x, task.dtype, batch_size)):
        yield data.inputs(rows, task.dtype, width)


def predict_inputs(
    task: Task,
    belief: Belief,
    x: Inputs,
    *,
    samples: int = SAMPLES,
    point: bool = False,
    seed: int = 0,
    batch_size: int | None = None,
) -> Tensor:
    """The predictive mean for inputs x, a tree like `Dataset.x`: averaged over `samples` draws of a Gaussian posterior,
    or over an ensemble. With `point`, the prediction of the mean weights."""
    networks = Mixture.of(belief.mean.unsqueeze(0)) if point else draws(belief, samples, seed=seed)
    x = to_tree(x, "")
    (first, size), *others = ((name, len(part)) for name, part in entries(x))
    for name, count in others:
        if count != size:
            raise DataError(f"{first} has {size} rows but {name} has {count}")
    device, width = tensors(x)[0].device, widths(x)
    parts = torch.split(torch.arange(size, device=device), batch_rows(x, task.dtype, batch_size))
    made = (predict_each(task, networks, in_dtype(batch_of(x, rows, width), task.dtype)) for rows in parts)
    return torch.cat([networks.combine(each) for each in made])


def predict_each(task: Task, networks: Mixture, x: Tree) -> Tensor:
    """The prediction of each network for inputs x, [M, N, …]."""
    x = to(x, task.device)
    return torch.stack([task.predict(theta, x) for theta in networks.theta])


def _variance(belief: Belief, networks: Mixture, made: Tensor) -> Tensor:
    """The variance over networks, [M, N, …] to [N, …]; for draws, an unbiased estimate of the posterior's."""
    variance, count = networks.combine((made - networks.combine(made)).square()), len(made)
    return variance * count / (count - 1) if isinstance(belief, Gaussian) and count > 1 else variance
