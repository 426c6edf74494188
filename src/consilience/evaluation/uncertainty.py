"""Uncertainty of predictions: entropies, their aleatoric and epistemic parts, and their histograms."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from consilience.core.beliefs import Belief
from consilience.core.errors import TaskError
from consilience.data.dataset import Dataset
from consilience.evaluation.predictions import input_batches, networks_of, predict_each, variance_over
from consilience.metrics import auroc, entropy
from consilience.tasks import Supervised, Task

BINS = 20


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """The uncertainty of every prediction, in nats [N]: `entropy` H[E p] is the sum of the other two.

    `expected_entropy` E H[p] is the noise in the labels (aleatoric). `mutual_information` H[E p] − E H[p] is the
    disagreement of the draws (epistemic), which more data would reduce. For a regression, E p is approximated by a
    Gaussian in every output, with standard deviation `sd` [N, …] = √(noise² + variance over draws)."""

    entropy: Tensor
    expected_entropy: Tensor
    mutual_information: Tensor
    sd: Tensor | None = None


def uncertainty(
    task: Task, belief: Belief, data: Dataset, *, samples: int = 10, batch_size: int | None = None
) -> Uncertainty:
    """The uncertainty about every example, over `samples` draws of a posterior or the networks of an ensemble.

    Labels are not used. With a single network the mutual information is zero. `batch_size` is the number of
    examples that are predicted at once, by default at most 1000 with at most 64 MiB of inputs."""
    check_unlabelled(task, data, numbers=True)
    networks, likelihood = networks_of(task, belief, samples), task.likelihood
    share = networks.weights.double().mean(1, keepdim=True)
    share = share / share.sum()
    total, expected, deviations = [], [], []
    for x in input_batches(task, data, torch.arange(len(data)), batch_size):
        # In float32 the difference of two close entropies would be rounding error.
        made = predict_each(task, networks, x).double()
        if likelihood.gaussian:
            deviations.append(likelihood.sd(networks.combine(made), variance_over(belief, networks, made)))
            total.append(_gaussian_entropy(deviations[-1]))
            each = torch.stack([_gaussian_entropy(likelihood.sd(one)) for one in made])
        else:
            total.append(entropy(networks.combine(made)))
            each = entropy(made)
        expected.append((each * share).sum(0))
    whole, noise = torch.cat(total), torch.cat(expected)
    sd = torch.cat(deviations).to(task.dtype) if deviations else None
    return Uncertainty(whole, noise, (whole - noise).clamp_min(0), sd)


def _gaussian_entropy(sd: Tensor) -> Tensor:
    """½ ln 2πe σ², summed over the outputs of each example."""
    return (2 * math.pi * math.e * sd.square()).log().reshape(len(sd), -1).sum(1) / 2


def check_unlabelled(task: Task, data: Dataset, numbers: bool = False) -> None:
    """Refuse inputs that the task cannot predict, and tasks whose predictions are no probabilities of classes or, with
    `numbers`, Gaussians."""
    likelihood = task.likelihood if isinstance(task, Supervised) else None
    if likelihood is None or not (likelihood.categorical or (numbers and likelihood.gaussian)):
        known = "classification and regression" if numbers else "classification"
        raise TaskError(f"predictive entropy is defined for {known} here, but the task is {task.kind}")
    task.check(data, targets=False)


@dataclass(frozen=True, eq=False)
class Entropies:
    """Predictive entropies in nats [N], between 0 and log `classes`; which predictions are `right` [N]; and the
    entropies of out-of-distribution examples, if there are any."""

    entropy: Tensor
    right: Tensor
    classes: int
    outside: Tensor | None = None

    def to_json(self) -> dict[str, Any]:
        """Histograms and means of right, wrong and out-of-distribution predictions over the same bins; and the AUROC of
        the entropy for wrong against right, and for out-of-distribution against test examples."""
        kinds = {"right": self.entropy[self.right], "wrong": self.entropy[~self.right]}
        if self.outside is not None:
            kinds["outside"] = self.outside
        edges = torch.linspace(0, math.log(max(self.classes, 2)), BINS + 1, dtype=torch.float64)
        found: dict[str, Any] = {"edges": edges.tolist()}
        for name, values in kinds.items():
            finite = values[values.isfinite()]
            mean = finite.mean().item() if len(finite) else None
            found[name] = {"count": histogram(finite, edges), "mean": mean}
        found["auroc"] = {
            "wrong": _auroc(kinds["right"], kinds["wrong"]),
            "outside": None if self.outside is None else _auroc(self.entropy, self.outside),
        }
        return found


def _auroc(negative: Tensor, positive: Tensor) -> float | None:
    """The AUROC of the finite values; None if one side has none."""
    negative, positive = (values[values.isfinite()] for values in (negative, positive))
    return auroc(negative, positive) if len(negative) and len(positive) else None


def histogram(values: Tensor, edges: Tensor) -> list[int]:
    """The number of finite values in each bin; values beyond the ends count in the outermost bins."""
    finite = values[values.isfinite()].cpu().double()
    index = torch.bucketize(finite, edges[1:-1].contiguous(), right=True)
    counts: list[int] = torch.bincount(index, minlength=len(edges) - 1).tolist()
    return counts
