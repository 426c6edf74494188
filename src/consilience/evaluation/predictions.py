"""Predictions of a belief: of one network, averaged over draws of a posterior, or of an ensemble."""

import torch
from torch import Tensor

from consilience.core.beliefs import Belief, Mixture, draws
from consilience.core.gaussian import Gaussian
from consilience.data.dataset import Dataset
from consilience.tasks import Regression, Task

SAMPLES = 10  # draws of a posterior that predictions are averaged over


def predict(
    task: Task, belief: Belief, data: Dataset, index: Tensor, *, samples: int = 0, batch_size: int = 1000
) -> Tensor:
    """Predictive means for rows `index`: of the mean weights, averaged over `samples` draws of the posterior, or of an
    ensemble."""
    return predict_with_variance(task, belief, data, index, samples=samples, batch_size=batch_size)[0]


def predict_with_variance(
    task: Task, belief: Belief, data: Dataset, index: Tensor, *, samples: int = 0, batch_size: int = 1000
) -> tuple[Tensor, Tensor | None]:
    """Predictive means and, for regression, their variance over networks."""
    networks, means, variances = draws(belief, samples), [], []
    for start in range(0, len(index), batch_size):
        x = data.inputs(index[start : start + batch_size].to(data.device), task.dtype)
        made = predict_each(task, networks, x)
        means.append(networks.combine(made))
        if isinstance(task, Regression):
            variances.append(_variance(belief, networks, made))
    return torch.cat(means), torch.cat(variances) if variances else None


def predict_inputs(
    task: Task, belief: Belief, x: Tensor, *, samples: int = SAMPLES, point: bool = False, seed: int = 0
) -> Tensor:
    """The predictive mean for inputs x: averaged over `samples` draws of a Gaussian posterior, or over an ensemble.
    With `point`, the prediction of the mean weights."""
    networks = Mixture.of(belief.mean.unsqueeze(0)) if point else draws(belief, samples, seed=seed)
    return networks.combine(predict_each(task, networks, x))


def predict_each(task: Task, networks: Mixture, x: Tensor) -> Tensor:
    """The prediction of each network for inputs x, [M, N, …]."""
    x = x.to(task.device)
    return torch.stack([task.predict(theta, x) for theta in networks.theta])


def _variance(belief: Belief, networks: Mixture, made: Tensor) -> Tensor:
    """The variance over networks, [M, N, …] to [N, …]; for draws, an unbiased estimate of the posterior's."""
    variance, count = networks.combine((made - networks.combine(made)).square()), len(made)
    return variance * count / (count - 1) if isinstance(belief, Gaussian) and count > 1 else variance
