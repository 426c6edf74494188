"""Metrics that a run is asked for: by name, or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from consilience.core.errors import ConfigError, TaskError, nearest
from consilience.metrics import classes
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


@dataclass(frozen=True)
class ClassMetric(Metric):
    """A score of probabilities of classes [N, C] and labels [N]. `weighted(prediction, y, weights)` returns it for many
    weightings of the examples."""

    weighted: Callable[[Tensor, Tensor, Tensor], Tensor] = classes.accuracy

    @classmethod
    def of(cls, name: str, weighted: Callable[[Tensor, Tensor, Tensor], Tensor]) -> ClassMetric:
        def score(prediction: Tensor, y: Tensor) -> float:
            labels = y.long()
            classes.check_classes(prediction, labels)
            return classes.alone(weighted(prediction, labels, classes.once(labels)))

        return cls(name, score, True, weighted)


Metrics = Mapping[str, Callable[[Any, Any], Any]] | Sequence[Metric | str]
"""Metrics: functions by name, or a list of `Metric` objects and of names that `named` knows."""
OF_CLASSES = {
    name: ClassMetric.of(name, getattr(classes, name)) for name in ("auroc", "auprc", "balanced_accuracy", "f1")
}
SENSITIVITY = "sensitivity"  # at the specificity 0.9, or as in "sensitivity@0.95"


def named(name: str) -> ClassMetric:
    """The metric "auroc", "auprc", "balanced_accuracy", "f1", or "sensitivity@0.9", the sensitivity at a specificity of
    0.9."""
    if name in OF_CLASSES:
        return OF_CLASSES[name]
    word, _, given = name.partition("@")
    if word != SENSITIVITY:
        raise ConfigError(f"there is no metric {name!r}; {nearest(name, [*OF_CLASSES, 'sensitivity@0.9'])}")
    try:
        specificity = float(given or 0.9)
    except ValueError:
        specificity = 0.0
    if not 0 < specificity < 1:
        raise ConfigError(f"{name!r}: the specificity is a number between 0 and 1, as in 'sensitivity@0.9'")
    return ClassMetric.of(f"{SENSITIVITY}@{specificity:g}", partial(classes.sensitivity, specificity=specificity))


def as_metrics(given: Metrics) -> tuple[Metric, ...]:
    """Metrics as `Metric` objects; an error if two have one name."""
    if isinstance(given, Mapping):
        return tuple(fn if isinstance(fn, Metric) else Metric(name, fn) for name, fn in given.items())
    several = isinstance(given, Sequence) and not isinstance(given, str)
    if not several or not all(isinstance(metric, Metric | str) for metric in given):
        raise ConfigError(f"metrics must map names to functions, or be a list of cs.Metric or of names, got {given!r}")
    found = tuple(metric if isinstance(metric, Metric) else named(metric) for metric in given)
    names = [metric.name for metric in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"two metrics have one name: {', '.join(names)}")
    return found


def directions(metrics: Sequence[Metric]) -> dict[str, int]:
    """The directions of metrics by name, as a run stores them."""
    return {metric.name: metric.direction for metric in metrics}
