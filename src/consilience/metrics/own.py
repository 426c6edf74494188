"""Metrics of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consilience.core.errors import ConfigError, TaskError
from consilience.metrics.summary import direction


@dataclass(frozen=True)
class Metric:
    """A score by name: `fn(prediction, y)` of all test predictions and targets returns one number. `higher_is_better`
    None leaves the direction to the name: a word such as "accuracy" or "error" decides, and without one nothing is
    highlighted."""

    name: str
    fn: Callable[[Any, Any], Any]
    higher_is_better: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ConfigError(f"a metric needs a name, got {self.name!r}")
        if not callable(self.fn):
            raise ConfigError(f"the metric {self.name!r} must be a function of (prediction, y), got {self.fn!r}")

    @property
    def direction(self) -> int:
        """+1 if more is better, −1 if less, 0 if neither."""
        if self.higher_is_better is None:
            return direction(self.name)
        return 1 if self.higher_is_better else -1

    def __call__(self, prediction: Any, y: Any) -> float:
        try:
            value = self.fn(prediction, y)
        except Exception as error:
            raise TaskError(f"the metric {self.name!r} failed with {type(error).__name__}: {error}") from error
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
            raise TaskError(
                f"the metric {self.name!r} must return one number, and it returned {type(value).__name__}{shape}"
            ) from error


Metrics = Mapping[str, Callable[[Any, Any], Any]] | Sequence[Metric]
"""Own metrics: functions by name, or `Metric` objects."""


def as_metrics(given: Metrics) -> tuple[Metric, ...]:
    """Own metrics as `Metric` objects; an error if two have one name."""
    if isinstance(given, Mapping):
        return tuple(fn if isinstance(fn, Metric) else Metric(name, fn) for name, fn in given.items())
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(m, Metric) for m in given):
        raise ConfigError(f"metrics must map names to functions, or be a list of cs.Metric, got {given!r}")
    names = [metric.name for metric in given]
    if len(set(names)) < len(names):
        raise ConfigError(f"two metrics have one name: {', '.join(names)}")
    return tuple(given)


def directions(metrics: Sequence[Metric]) -> dict[str, int]:
    """The directions of metrics by name, as a run stores them."""
    return {metric.name: metric.direction for metric in metrics}
