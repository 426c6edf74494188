"""Confidence intervals of scores: closed forms where there are good ones, and otherwise the bootstrap.

Bootstrap samples draw each client's examples anew, as many as it has. The draws are a function of the client alone, so
the samples of two models are the same ones, and the differences of their scores are paired.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core import keys
from consilience.evaluation.tallies import Tallied
from consilience.metrics import auroc_interval, mean_of_shares, percentiles, wilson
from consilience.metrics.intervals import Bounds

SAMPLES = 1000  # bootstrap samples
AT_ONCE = 2**22  # weights of examples that are in memory together
Replicates = dict[str, Tensor]
"""The scores of bootstrap samples by metric, [SAMPLES] each."""


@dataclass(frozen=True)
class Spread:
    """The intervals of one predictor's scores, overall and of each client, and the bootstrap replicates of clients."""

    overall: dict[str, Bounds]
    clients: dict[int, dict[str, Bounds]]
    replicates: dict[int, Replicates]


def spreads(found: Mapping[int, Tallied], whole: Tallied, level: float) -> Spread:
    """The intervals of scores of clients, by number, and of all their predictions together (`whole`)."""
    sizes = {client: one.examples for client, one in found.items()}
    replicates = {client: _replicates(one, {client: sizes[client]}) for client, one in found.items()}
    together = replicates[next(iter(found))] if len(found) == 1 else _replicates(whole, sizes)
    own = {client: bounds(one, replicates[client], level) for client, one in found.items()}
    return Spread(bounds(whole, together, level), own, replicates)


def bounds(scored: Tallied, replicates: Replicates, level: float) -> dict[str, Bounds]:
    """The intervals of the scores that have one."""
    closed = _closed_forms(scored, level)
    own = {metric.name for metric in scored.metrics}
    ends = {
        name: percentiles(values, level) for name, values in replicates.items() if name not in closed or name in own
    }
    every = {**ends, **{name: value for name, value in closed.items() if name in replicates and name not in own}}
    return {name: found for name in replicates if (found := every[name]) is not None}


def _closed_forms(found: Tallied, level: float) -> dict[str, Bounds | None]:
    """Of classes: Wilson's interval of the accuracy, those of the classes' shares together for the balanced accuracy,
    and DeLong's of the area under the ROC curve."""
    kept = found.predictions
    if not kept.of_classes:
        return {}
    prediction, y = kept.prediction, kept.y.long()
    right = (prediction.argmax(1) == y).double()
    forms: dict[str, Bounds | None] = {"accuracy": wilson(float(right.mean()), len(y), level)}
    if prediction.shape[1] == 2:
        groups = [right[y == c] for c in (0, 1)]
        both = all(map(len, groups))
        shares, counts = [float(group.mean()) for group in groups], list(map(len, groups))
        forms["balanced_accuracy"] = mean_of_shares(shares, counts, level) if both else None
        finite = bool(prediction.isfinite().all())
        forms["auroc"] = auroc_interval(prediction[y == 0, 1], prediction[y == 1, 1], level) if finite else None
    return forms


def _replicates(found: Tallied, sizes: Mapping[int, int]) -> Replicates:
    """The scores of all bootstrap samples, some samples at a time."""
    device = found.predictions.y.device if isinstance(found.predictions.y, Tensor) else "cpu"
    parts = torch.split(torch.arange(SAMPLES), max(1, AT_ONCE // max(1, found.examples)))
    each = [
        found.resampled(torch.cat([times(client, size, part) for client, size in sizes.items()], 1).to(device))
        for part in parts
    ]
    return {name: torch.cat([one[name].cpu() for one in each]) for name in each[0]}


def times(client: int, size: int, samples: Tensor) -> Tensor:
    """How often each of a client's examples occurs in these bootstrap samples, [samples, size]."""
    each = keys.mix(keys.key(0, purpose="bootstrap", client=client) ^ samples)
    drawn = (keys.uniform(each, size) * size).long()
    return torch.zeros(len(samples), size, dtype=torch.float64).scatter_add_(1, drawn, torch.ones_like(drawn).double())


def paired_difference(pairs: list[tuple[Tensor, Tensor]], level: float) -> Bounds | None:
    """The interval of the mean difference of two models' scores over test sets, from the replicates of each."""
    differences = torch.stack([a - b for a, b in pairs]).mean(0)
    return percentiles(differences.round(decimals=12), level)  # equal scores differ by 0, not by a rounding error
