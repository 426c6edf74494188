"""Tallies of predictions, batch by batch: the likelihood's own, and the user's metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from consilience.core import TaskError
from consilience.core.beliefs import Belief
from consilience.core.records import to
from consilience.data.dataset import Dataset
from consilience.evaluation.predictions import padded_widths, predict_batches
from consilience.metrics import ClassMetric, Metric
from consilience.tasks import Task
from consilience.tasks.likelihoods import Likelihood, Predictions, Tally, samples


@dataclass(frozen=True)
class Tallied:
    """The likelihood's tally of some examples, with own metrics. Where predictions are not kept, an own metric is the
    mean over batches, weighted by their examples; `sums` has the sum."""

    likelihood: Likelihood
    metrics: Sequence[Metric]
    tally: Tally
    examples: int
    sums: tuple[float, ...]

    def __add__(self, other: Tallied) -> Tallied:
        sums = tuple(a + b for a, b in zip(self.sums, other.sums, strict=True))
        both = self.tally + other.tally
        return Tallied(self.likelihood, self.metrics, both, self.examples + other.examples, sums)

    def scores(self) -> dict[str, float]:
        """The likelihood's scores, and those of own metrics."""
        if isinstance(self.tally, Predictions):
            shown = self.likelihood.shown(self.tally.prediction)
            own = {metric.name: metric(shown, self.tally.y) for metric in self.metrics}
        else:
            means = zip(self.metrics, self.sums, strict=True)
            own = {metric.name: total / self.examples for metric, total in means}
        return {**self.tally.scores(), **own}

    def resampled(self, weights: Tensor) -> dict[str, Tensor]:
        """The scores of bootstrap samples [R], for the numbers of times that each example occurs in them [R, N]."""
        kept = self.predictions
        shown = self.likelihood.shown(kept.prediction)
        found = self.likelihood.resampled(kept.prediction, kept.y, kept.spread, weights)
        for metric in self.metrics:
            if isinstance(metric, ClassMetric):
                found[metric.name] = metric.weighted(shown, kept.y.long(), weights)
            else:
                each = [metric(*some) for some in samples((shown, kept.y), weights)]
                found[metric.name] = torch.tensor(each, dtype=torch.float64)
        return found

    @property
    def predictions(self) -> Predictions:
        """The predictions; an error where they are not kept."""
        if not isinstance(self.tally, Predictions):
            raise TaskError(
                f"intervals need the predictions of single examples, which are not kept for {self.likelihood.kind}: "
                "leave intervals out"
            )
        return self.tally


def tallied(
    task: Task,
    belief: Belief,
    data: Dataset,
    index: Tensor,
    metrics: Sequence[Metric],
    samples: int,
    batch_size: int | None = None,
) -> Tallied:
    """The tally of rows `index`, with predictions as by `predict`."""
    likelihood, width, found = task.likelihood, padded_widths(task, data), []
    for rows, prediction, spread in predict_batches(task, belief, data, index, samples=samples, batch_size=batch_size):
        y = to(data.targets(rows.to(data.device), task.dtype, width), task.device)
        tally = likelihood.tally(prediction, y, spread)
        kept = isinstance(tally, Predictions)
        sums = tuple(0.0 if kept else metric(prediction, y) * len(rows) for metric in metrics)
        found.append(Tallied(likelihood, metrics, tally, len(rows), sums))
    return reduce(add, found)
