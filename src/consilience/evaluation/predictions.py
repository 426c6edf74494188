"""Predictions of a belief: of one network, averaged over draws of a posterior, or of an ensemble."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from consilience.core.beliefs import Belief, Mixture, draws
from consilience.core.checks import Count, check_type
from consilience.core.errors import DataError, TaskError
from consilience.core.gaussian import Gaussian
from consilience.core.records import Tree, to
from consilience.data.dataset import Dataset
from consilience.data.ragged import Ragged
from consilience.data.trees import Widths, batch_of, entries, example_bytes, in_dtype, to_tree, widths
from consilience.tasks import Supervised, Task

SAMPLES = 10  # draws of a posterior that predictions are averaged over
AT_ONCE = 2**26  # numbers in the predictions of a batch, where these are large
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


def networks_of(task: Task, belief: Belief, samples: int, *, seed: int = 0) -> Mixture:
    """The networks that a belief predicts with: an ensemble itself, `samples` draws of a posterior, or the mean.

    Running averages of BatchNorm layers describe inputs and are not uncertain weights. Every draw has those of the
    mean: noise could make a variance nearly 0, and the layer would divide by it."""
    found, running = draws(belief, samples, seed=seed), task.running
    if running is None or not isinstance(belief, Gaussian):
        return found
    return Mixture(torch.where(running > 0, belief.mean, found.theta), found.weights)


def predict(
    task: Task, belief: Belief, data: Dataset, index: Tensor, *, samples: int = 0, batch_size: int | None = None
) -> Tensor:
    """Predictive means for rows `index`: of the mean weights, averaged over `samples` draws of the posterior, or of an
    ensemble."""
    return predict_with_variance(task, belief, data, index, samples=samples, batch_size=batch_size)[0]


def predict_with_variance(
    task: Task, belief: Belief, data: Dataset, index: Tensor, *, samples: int = 0, batch_size: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Predictive means and, for numbers, their variance over networks."""
    found = list(predict_batches(task, belief, data, index, samples=samples, batch_size=batch_size))
    variances = [variance for _, _, variance in found if variance is not None]
    return torch.cat([mean for _, mean, _ in found]), torch.cat(variances) if variances else None


def predict_batches(
    task: Task, belief: Belief, data: Dataset, index: Tensor, *, samples: int = 0, batch_size: int | None = None
) -> Iterator[tuple[Tensor, Any, Tensor | None]]:
    """(rows, predictive means, their variance over networks where scores need it), batch by batch."""
    networks, spreads = networks_of(task, belief, samples), isinstance(task, Supervised) and task.likelihood.spreads
    size = batch_rows(data.x, task.dtype, _rows(task, networks, data, index, batch_size))
    for rows, x in zip(torch.split(index, size), input_batches(task, data, index, size), strict=True):
        made = predict_each(task, networks, x)
        variance = variance_over(belief, networks, made) if spreads else None
        yield rows, combine(networks, made), variance


def input_batches(task: Task, data: Dataset, index: Tensor, batch_size: int | None = None) -> Iterator[Tree]:
    """The inputs of rows `index`, batch by batch."""
    width = padded_widths(task, data)
    parts = torch.split(index.to(data.device), batch_rows(data.x, task.dtype, batch_size))
    for held, rows in data.batches(parts):
        yield held.inputs(rows, task.dtype, width)


def padded_widths(task: Task, data: Dataset) -> Widths | None:
    """If the targets are Ragged and predictions are kept, all batches have the width of the longest row, so that
    predictions for each place can be joined."""
    ragged = any(isinstance(part, Ragged) for _, part in entries(data.y))
    streams = isinstance(task, Supervised) and task.likelihood.streams
    return data.widths if ragged and not streams else None


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
    networks = Mixture.of(belief.mean.unsqueeze(0)) if point else networks_of(task, belief, samples, seed=seed)
    _must_average(task, networks)
    x = to_tree(x, "")
    (first, size), *others = ((name, len(part)) for name, part in entries(x))
    for name, count in others:
        if count != size:
            raise DataError(f"{first} has {size} rows but {name} has {count}")
    device, width = next(part.device for _, part in entries(x)), widths(x)
    parts = torch.split(torch.arange(size, device=device), batch_rows(x, task.dtype, batch_size))
    made = (predict_each(task, networks, in_dtype(batch_of(x, rows, width), task.dtype)) for rows in parts)
    found: Tensor = tree_map(lambda *leaves: torch.cat(leaves), *[combine(networks, each) for each in made])
    return found


def unlabelled(x: Inputs, classes: tuple[str, ...]) -> Dataset:
    """Model inputs as a data set with names of classes and without targets."""
    x = to_tree(x, "")
    count = len(next(part for _, part in entries(x)))
    return Dataset(x, torch.zeros(count), classes=classes)


def predict_each(task: Task, networks: Mixture, x: Tree) -> Any:
    """The prediction of each network for inputs x, [M, N, …]."""
    _must_average(task, networks)
    x = to(x, task.device)
    return tree_map(lambda *found: torch.stack(found), *[task.predict(theta, x) for theta in networks.theta])


def combine(networks: Mixture, made: Any) -> Any:
    """The mean over networks of predictions [M, N, …]; the prediction itself if there is one network."""
    if len(networks.theta) == 1 and not isinstance(made, Tensor):
        return tree_map(lambda leaf: leaf[0], made)
    return networks.combine(made)


def _must_average(task: Task, networks: Mixture) -> None:
    if len(networks.theta) > 1 and isinstance(task, Supervised) and not task.likelihood.averages:
        raise TaskError(
            "the outputs of a module with a plain loss may not be averaged over networks: predict with point=True, by "
            "the mean weights, or give cs.Supervised predict=, a function of the output that returns a quantity to "
            "average, such as a probability"
        )


def _rows(task: Task, networks: Mixture, data: Dataset, index: Tensor, batch_size: int | None) -> int | None:
    """The number of examples in a batch: fewer than usual where predictions are large."""
    if not len(index) or not isinstance(task, Supervised) or not task.likelihood.streams:
        return batch_size
    longest = data.inputs(index[:1].to(data.device), task.dtype, data.widths)
    one = task.predict(networks.theta[0], to(longest, task.device))
    each: int = sum(leaf.numel() for leaf in tree_leaves(one)) * len(networks.theta)
    return max(1, min(batch_rows(data.x, task.dtype, batch_size), AT_ONCE // max(each, 1)))


def variance_over(belief: Belief, networks: Mixture, made: Tensor) -> Tensor:
    """The variance over networks, [M, N, …] to [N, …]; for draws, an unbiased estimate of the posterior's."""
    variance, count = networks.combine((made - networks.combine(made)).square()), len(made)
    return variance * count / (count - 1) if isinstance(belief, Gaussian) and count > 1 else variance
