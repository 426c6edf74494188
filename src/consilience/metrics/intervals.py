"""Confidence intervals of scores, from the examples of a test set."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from consilience.core.errors import ConfigError

Bounds = list[float]
"""The lower and the upper end of an interval, as plain data."""


def check_level(level: float | None) -> None:
    """Refuse a level that is not a probability."""
    if level is not None and not 0 < level < 1:
        raise ConfigError(f"intervals is the confidence level, a probability between 0 and 1, got {level}")


def z_of(level: float) -> float:
    """The quantile of the standard normal distribution of a two-sided interval."""
    return NormalDist().inv_cdf((1 + level) / 2)


def wilson(share: float, count: float, level: float) -> Bounds:
    """Wilson's score interval of a share of `count` examples. It has a width for a share of 0 or 1, too."""
    z2 = z_of(level) ** 2
    middle, half = share + z2 / (2 * count), math.sqrt(z2 * (share * (1 - share) + z2 / (4 * count)) / count)
    return [max(0.0, (middle - half) / (1 + z2 / count)), min(1.0, (middle + half) / (1 + z2 / count))]


def mean_of_shares(shares: Sequence[float], counts: Sequence[float], level: float) -> Bounds:
    """The interval of the mean of independent shares, from Wilson's intervals [l_c, u_c] of each (Zou and Donner,
    2008): mean − √Σ (share_c − l_c)² / C to mean + √Σ (u_c − share_c)² / C."""
    each = [wilson(share, count, level) for share, count in zip(shares, counts, strict=True)]
    mean = sum(shares) / len(shares)
    below = math.hypot(*(share - low for share, (low, _) in zip(shares, each, strict=True))) / len(shares)
    above = math.hypot(*(high - share for share, (_, high) in zip(shares, each, strict=True))) / len(shares)
    return [mean - below, mean + above]


def auroc_interval(negative: Tensor, positive: Tensor, level: float) -> Bounds | None:
    """DeLong's interval of the area under the ROC curve, symmetric for its logit, so that it stays within 0 and 1.

    Where the scores separate the classes, the variance is 0 and says nothing: then the other end is (α/2)^{1/m} away,
    m being the size of the smaller class, because m disjoint pairs would all be in order with probability A^m. None for
    a class of fewer than two examples."""
    n, m = len(negative), len(positive)
    if min(n, m) < 2:
        return None
    from scipy.stats import rankdata  # slow to load

    scores = torch.cat([positive, negative]).detach().cpu().double().numpy()
    pooled, own, others = rankdata(scores), rankdata(scores[:m]), rankdata(scores[m:])
    # The share of negative scores below each positive one, and of positive scores above each negative one.
    above, below = (pooled[:m] - own) / n, 1 - (pooled[m:] - others) / m
    area = float(above.mean())
    if area in (0.0, 1.0):
        far = ((1 - level) / 2) ** (1 / min(n, m))
        return [far, 1.0] if area else [0.0, 1 - far]
    half = z_of(level) * math.sqrt(above.var(ddof=1) / m + below.var(ddof=1) / n) / (area * (1 - area))
    logit = math.log(area / (1 - area))
    return [_sigmoid(logit - half), _sigmoid(logit + half)]


def percentiles(replicates: Tensor, level: float) -> Bounds | None:
    """The percentile interval of bootstrap replicates, without those in which the score is not defined. None if the
    rest are all equal: then the examples do not tell how the score varies."""
    defined = replicates[replicates.isfinite()]
    if not len(defined) or bool((defined == defined[0]).all()):
        return None
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64, device=defined.device)
    found: Bounds = defined.double().quantile(ends).tolist()
    return found


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))
