"""Scores of classes for many weightings of the examples at once: [R, N] weights give [R] scores.

A weight is how often an example counts, so the rows of weights may be bootstrap samples. With more than two classes a
score is the mean over the classes that occur, each against all others; of two classes it is that of class 1. A
weighting in which fewer than two classes occur has no score: nan.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.core.errors import DataError

Curve = Callable[[Tensor, Tensor], Tensor]
"""A function of the points of ROC curves."""

TINY = torch.finfo(torch.float32).tiny  # the smallest normal number: a probability of exactly 0 costs 87.3 nats
BINS = 15  # of the calibration error


def accuracy(probs: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Σ w 1[argmax p = y] / Σ w."""
    return _mean((probs.argmax(1) == y).double(), weights)


def nll(probs: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """−Σ w log p_y / Σ w."""
    return _mean(-_true(probs, y).clamp(min=TINY).log(), weights)


def brier(probs: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Σ w Σ_c (p_c − 1[y = c])² / Σ w."""
    error = probs.double().scatter_add(1, y[:, None], -torch.ones(len(y), 1, dtype=torch.float64, device=y.device))
    return _mean(error.square().sum(1), weights)


def ece(probs: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Expected calibration error in 15 bins of the confidence: Σ_b |Σ_{i in b} w_i (right_i − p_i)| / Σ w."""
    top, label = probs.max(1)
    edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64, device=top.device)[1:-1].contiguous()
    bins = F.one_hot(torch.bucketize(top.double(), edges, right=True), BINS)
    gap = (label == y).double() - top.double()
    return (weights @ (bins * gap[:, None])).abs().sum(1) / weights.sum(1)


def auroc(probs: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Area under the ROC curve: P(p > p') + ½ P(p = p') for an example of the class and one of the others."""
    return _over_classes(probs, y, weights, _area)


def auprc(probs: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Average precision Σ_t (recall_t − recall_{t−1}) precision_t over all thresholds t, from the highest score on."""
    return _over_classes(probs, y, weights, _precision)


def sensitivity(probs: Tensor, y: Tensor, weights: Tensor, specificity: float) -> Tensor:
    """The highest sensitivity of a threshold whose specificity is at least the given one."""

    def highest(hits: Tensor, alarms: Tensor) -> Tensor:
        allowed = alarms <= alarms[:, -1:] * (1 - specificity) * (1 + 1e-12)
        return torch.where(allowed, hits, 0).amax(1) / hits[:, -1]

    return _over_classes(probs, y, weights, highest)


def balanced_accuracy(probs: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """The mean over the classes that occur of the share of their examples that is predicted right."""
    hits, _, actual = _confusion(probs, y, weights)
    return _where_two(actual, (hits / actual).nanmean(1))


def f1(probs: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """2 TP / (2 TP + FP + FN)."""
    hits, predicted, actual = _confusion(probs, y, weights)
    each = 2 * hits / (predicted + actual)
    each = each[:, 1] if each.shape[1] == 2 else torch.where(actual > 0, each, torch.nan).nanmean(1)
    return _where_two(actual, each)


def alone(score: Tensor) -> float:
    """The only one of [1] scores."""
    return float(score[0])


def once(y: Tensor) -> Tensor:
    """The weights [1, N] with which every example counts once."""
    return torch.ones(1, len(y), dtype=torch.float64, device=y.device)


def check_classes(probs: Tensor, y: Tensor) -> None:
    """Refuse predictions that are not probabilities of classes, and labels that are not theirs."""
    if probs.dim() != 2 or y.shape != probs.shape[:1]:
        raise DataError(f"probabilities must be [N, C] and labels [N], got {list(probs.shape)} and {list(y.shape)}")
    if y.numel() == 0:
        raise DataError("there are no examples to score")
    if not 0 <= int(y.min()) <= int(y.max()) < probs.shape[1]:
        raise DataError(f"labels must lie in 0..{probs.shape[1] - 1}, found {int(y.min())}..{int(y.max())}")


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    return weights @ values.double() / weights.sum(1)


def _true(probs: Tensor, y: Tensor) -> Tensor:
    return probs.double().gather(1, y[:, None]).squeeze(1)


def _confusion(probs: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of right predictions, of predictions and of examples of each class, [R, C] each."""
    classes = probs.shape[1]
    actual, predicted = (F.one_hot(labels, classes).double() for labels in (y, probs.argmax(1)))
    return weights @ (actual * predicted), weights @ predicted, weights @ actual


def _where_two(actual: Tensor, score: Tensor) -> Tensor:
    """The scores where at least two classes occur, nan elsewhere."""
    return torch.where((actual > 0).sum(1) >= 2, score, torch.nan)


def _over_classes(probs: Tensor, y: Tensor, weights: Tensor, of_curve: Curve) -> Tensor:
    """The mean of a function of the ROC curve over the classes that occur; nan if a probability is not finite."""
    if not bool(probs.isfinite().all()):
        return torch.full((len(weights),), torch.nan, dtype=torch.float64, device=weights.device)
    classes = [1] if probs.shape[1] == 2 else range(probs.shape[1])
    each = []
    for c in classes:
        hits, alarms = curve(probs[:, c], y == c, weights)
        both = (hits[:, -1] > 0) & (alarms[:, -1] > 0)
        each.append(torch.where(both, of_curve(hits, alarms), torch.nan))
    return torch.stack(each, 1).nanmean(1)


def curve(score: Tensor, positive: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of positive and of negative examples with scores of at least each threshold, [R, T + 1] each: from
    none of the examples to all of them. Equal scores have one threshold."""
    order = score.double().argsort(descending=True)
    score, positive, weights = score[order], positive[order], weights[:, order]
    last = torch.cat([score[1:] != score[:-1], torch.ones_like(positive[:1])])
    none = weights.new_zeros(len(weights), 1)
    hits = torch.cat([none, (weights * positive).cumsum(1)[:, last]], 1)
    return hits, torch.cat([none, weights.cumsum(1)[:, last]], 1) - hits


def _area(hits: Tensor, alarms: Tensor) -> Tensor:
    return (alarms.diff(dim=1) * (hits[:, 1:] + hits[:, :-1])).sum(1) / (2 * hits[:, -1] * alarms[:, -1])


def _precision(hits: Tensor, alarms: Tensor) -> Tensor:
    precision = hits[:, 1:] / (hits + alarms)[:, 1:].clamp(min=TINY)  # 0 / 0 at thresholds that nothing has reached
    return (hits.diff(dim=1) * precision).sum(1) / hits[:, -1]
