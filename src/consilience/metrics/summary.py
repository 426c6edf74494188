"""What tables need to know about a metric: its mean and spread over seeds, and which way is better."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from consilience.errors import DataError

_UP = {"accuracy", "r2", "precision", "recall", "f1", "auc", "auroc", "ap"}
_DOWN = {"loss", "nll", "ece", "brier", "mse", "rmse", "mae", "error", "wer", "cer", "fid", "perplexity"}


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (n − 1); one value has no spread, so None."""
    if not values:
        raise DataError("there are no values to average")
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def direction(metric: str) -> int:
    """+1 if more is better, −1 if less, 0 if neither: a word of the name decides ("micro_f1", "test NLL")."""
    words = set(re.split(r"[\W_]+", metric.lower()))
    return bool(words & _UP) - bool(words & _DOWN)
