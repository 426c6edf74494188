"""Summaries of a metric for tables: mean and standard deviation over seeds, and the better direction."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from consilience.core.errors import ConfigError, DataError, nearest

MARGINAL = " (marginal)"  # suffix of scores of the posterior average
_UP = {"accuracy", "r2", "precision", "recall", "f1", "auc", "auroc", "auprc", "ap", "sensitivity"}
_UP |= {"modes", "classes", "class_coverage", "good_share", "classifier_score", "concordance"}
_DOWN = {"loss", "nll", "ece", "brier", "mse", "rmse", "mae", "error", "wer", "cer", "fid", "perplexity"}
_DOWN |= {"classifier_distance", "bits", "set_size", "interval_width"}
_SHARES = {"accuracy", "ece", "precision", "recall", "f1", "auc", "auroc", "auprc", "ap", "sensitivity"}
_SHARES |= {"concordance", "good_share", "sequence_error_rate", "coverage"}
_SIZES = {"mse", "rmse", "mae", "perplexity", "bits", "fid", "classifier_distance", "error", "wer", "cer", "modes"}
_SIZES |= {"size", "width"}


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (n − 1), None for one value."""
    if not values:
        raise DataError("there are no values to average")
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def running_means(curve: Sequence[tuple[int, float]], window: int) -> list[tuple[int, float]]:
    """(round, mean over the values of the last `window` rounds) for each (round, value) of a curve from round `window`
    on. Curves may have values at some rounds only."""
    return [
        (end, statistics.fmean(value for at, value in curve if end - window < at <= end))
        for end, _ in curve
        if end >= window
    ]


def best(curve: Sequence[tuple[int, float]], window: int = 100) -> float | None:
    """The highest running mean; None for a curve that is shorter than the window."""
    return max((value for _, value in running_means(curve, window)), default=None)


def rounds_to(curve: Sequence[tuple[int, float]], target: float, window: int = 10) -> int | None:
    """The first round whose running mean is at least `target`; None if there is none."""
    return next((end for end, value in running_means(curve, window) if value >= target), None)


Directions = Mapping[str, int]
"""Directions of own metrics by name: +1 if more is better, −1 if less, 0 if neither."""
NO_OWN: Directions = MappingProxyType({})


def direction(metric: str, own: Directions = NO_OWN) -> int:
    """+1 if more is better, −1 if less, 0 if neither. `own` has the directions of the user's metrics. For others a word
    of the name decides ("micro_f1", "test NLL"), or words that belong together ("good_share")."""
    if (name := metric.removesuffix(MARGINAL)) in own:
        return own[name]
    words = _words(metric)
    return bool(words & _UP) - bool(words & _DOWN)


# Of generators' scores, those that a collapsed generator cannot win.
PREFERRED = ("nll", "fid", "classifier_distance", "modes", "recall")


def choose_score(scores: Mapping[str, float], given: str | None, key: str, own: Directions = NO_OWN) -> str:
    """The score to select by: `given`, which must exist and have a direction, or the first of `PREFERRED`, or of all.
    `key` names the argument in errors."""
    usable = [metric for metric in scores if direction(metric, own)]
    if given is None and usable:
        begins = {metric.partition("@")[0]: metric for metric in reversed(usable)}
        return next((begins[name] for name in PREFERRED if name in begins), usable[0])
    if given is None or given not in usable:
        raise ConfigError(f"{key}: {given!r} is no score to select by; {nearest(given or '', usable)}")
    return given


def bounds(metric: str) -> tuple[float, float]:
    """The range of a metric's values, by the words of its name: shares are between 0 and 1, errors are not negative."""
    words = _words(metric)
    if words & _SHARES:
        return 0.0, 1.0
    if "brier" in words:
        return 0.0, 2.0
    return 0.0 if words & _SIZES else -math.inf, 1.0 if "r2" in words else math.inf


def _words(metric: str) -> set[str]:
    return {*re.split(r"[\W_]+", metric.lower()), *re.split(r"\W+", metric.lower())}
