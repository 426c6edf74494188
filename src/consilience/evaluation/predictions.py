"""Predictions of a belief: of one network, averaged over draws of a posterior, or of an ensemble."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from consilience.core.beliefs import Belief, Mixture, draws
from consilience.core.errors import TaskError
from consilience.core.gaussian import Gaussian
from consilience.data.dataset import Dataset
from consilience.tasks import Supervised, Task

SAMPLES = 10  # draws of a posterior that predictions are averaged over
AT_ONCE = 2**26  # numbers in the predictions of a batch, where these are large


def predict(
    task: Task, belief: Belief, data: Dataset, index: Tensor, *, samples: int = 0, batch_size: int = 1000
) -> Tensor:
    """Predictive means for rows `index`: of the mean weights, averaged over `samples` draws of the posterior, or of an
    ensemble."""
    return predict_with_variance(task, belief, data, index, samples=samples, batch_size=batch_size)[0]


def predict_with_variance(
    task: Task, belief: Belief, data: Dataset, index: Tensor, *, samples: int = 0, batch_size: int = 1000
) -> tuple[Tensor, Tensor | None]:
    """Predictive means and, for numbers, their variance over networks."""
    found = list(predict_batches(task, belief, data, index, samples=samples, batch_size=batch_size))
    variances = [variance for _, _, variance in found if variance is not None]
    return torch.cat([mean for _, mean, _ in found]), torch.cat(variances) if variances else None


def predict_batches(
    task: Task, belief: Belief, data: Dataset, index: Tensor, *, samples: int = 0, batch_size: int = 1000
) -> Iterator[tuple[Tensor, Any, Tensor | None]]:
    """(rows, predictive means, their variance over networks where scores need it), batch by batch."""
    networks, spreads = draws(belief, samples), isinstance(task, Supervised) and task.likelihood.spreads
    for rows in torch.split(index, _rows(task, networks, data, index, batch_size)):
        made = predict_each(task, networks, data.inputs(rows.to(data.x.device), task.dtype))
        variance = variance_over(belief, networks, made) if spreads else None
        yield rows, combine(networks, made), variance


def predict_inputs(
    task: Task, belief: Belief, x: Tensor, *, samples: int = SAMPLES, point: bool = False, seed: int = 0
) -> Tensor:
    """The predictive mean for inputs x: averaged over `samples` draws of a Gaussian posterior, or over an ensemble.
    With `point`, the prediction of the mean weights."""
    networks = Mixture.of(belief.mean.unsqueeze(0)) if point else draws(belief, samples, seed=seed)
    _must_average(task, networks)
    found: Tensor = combine(networks, predict_each(task, networks, x))
    return found


def predict_each(task: Task, networks: Mixture, x: Tensor) -> Any:
    """The prediction of each network for inputs x, [M, N, …]."""
    _must_average(task, networks)
    x = x.to(task.device)
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


def _rows(task: Task, networks: Mixture, data: Dataset, index: Tensor, batch_size: int) -> int:
    """The number of examples in a batch: fewer than `batch_size` where predictions are large."""
    if not len(index) or not isinstance(task, Supervised) or not task.likelihood.streams:
        return batch_size
    one = task.predict(networks.theta[0], data.inputs(index[:1].to(data.x.device), task.dtype).to(task.device))
    each: int = sum(leaf.numel() for leaf in tree_leaves(one)) * len(networks.theta)
    return max(1, min(batch_size, AT_ONCE // max(each, 1)))


def variance_over(belief: Belief, networks: Mixture, made: Tensor) -> Tensor:
    """The variance over networks, [M, N, …] to [N, …]; for draws, an unbiased estimate of the posterior's."""
    variance, count = networks.combine((made - networks.combine(made)).square()), len(made)
    return variance * count / (count - 1) if isinstance(belief, Gaussian) and count > 1 else variance
