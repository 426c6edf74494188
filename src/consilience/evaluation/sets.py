"""Sets of targets for inputs: classes whose scores, or numbers whose residuals, do not exceed a threshold."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from consilience.core import DataError, TaskError, keys
from consilience.metrics.intervals import z_of
from consilience.tasks import Supervised, Task


def lac(p: Tensor, u: Tensor) -> Tensor:
    """1 − p of every class: the smallest sets in the mean. A set may be empty."""
    return 1 - p


def aps(p: Tensor, u: Tensor) -> Tensor:
    """The probability of all likelier classes and a random share u of the class's own (Romano et al., 2020): coverage
    is more even over easy and hard examples."""
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    return torch.empty_like(p).scatter_(-1, order, ordered.cumsum(-1) - ordered * (1 - u))


def shares(p: Tensor) -> Tensor:
    """The random share of each example, [N, 1]: a hash of its probabilities, rounded to 8 digits in base 2. A score is
    then a function of the example alone, as the guarantee needs: not of its place among others, which would give every
    example that is predicted alone the same share."""
    digits = (p.float().view(torch.int32) >> 15).long()
    columns = keys.bits(keys.key(0, purpose="shares"), p.shape[1]).to(p.device)
    return keys.uniform(keys.mix(keys.mix(digits ^ columns).sum(1)), 1)


OF_CLASSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"lac": lac, "aps": aps}
OF_NUMBERS = "residual"
"""|y − mean| / sd, the largest of the numbers of an example."""


def check_score(task: Task, score: str) -> str:
    """The score for the task; an error if the task has none."""
    likelihood = task.likelihood if isinstance(task, Supervised) else None
    if likelihood is not None and likelihood.gaussian:
        return OF_NUMBERS
    if likelihood is None or not likelihood.categorical or likelihood.streams:
        raise TaskError(
            f"prediction sets need classes or numbers to predict, and the task is {task.kind}: use cs.Classification, "
            "cs.Binary, cs.Ordinal, cs.Regression or cs.Heteroscedastic"
        )
    if score not in OF_CLASSES:
        raise DataError(f"score must be one of {', '.join(OF_CLASSES)}, got {score!r}")
    return score


@dataclass(frozen=True)
class Threshold:
    """The largest score of a target in a set, the coverage it was chosen for, and the guarantee in words."""

    value: float
    coverage: float
    guarantee: str


@dataclass(frozen=True)
class PredictionSets(ABC):
    """Sets for N inputs, by a threshold."""

    size_name: ClassVar[str]
    threshold: Threshold

    @property
    def guarantee(self) -> str:
        """The examples for which the coverage is guaranteed."""
        return self.threshold.guarantee

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def covers(self, y: Any) -> Tensor:
        """Whether each set contains its target y, [N]."""

    @property
    @abstractmethod
    def sizes(self) -> Tensor:
        """The size of each set, [N]."""

    def __repr__(self) -> str:
        mean = float(self.sizes.double().mean()) if len(self) else math.nan
        size = self.size_name.replace("_", " ")
        return f"{type(self).__name__}({len(self)} sets, mean {size} {mean:.4g}; {self.guarantee})"


@dataclass(frozen=True, repr=False)
class LabelSets(PredictionSets):
    """Sets of classes: `members` [N, C] is true for the classes in a set. `sets[i]` has the names of its classes."""

    size_name = "set_size"
    members: Tensor
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, row: int) -> tuple[str, ...]:
        inside = self.members[row].nonzero().flatten().tolist()
        return tuple(self.classes[c] if c < len(self.classes) else str(c) for c in inside)

    def covers(self, y: Any) -> Tensor:
        y = torch.as_tensor(y, device=self.members.device).long().reshape(-1, 1)
        _check_targets(len(y), len(self))
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.members.shape[1]:
            raise DataError(f"y must be the numbers of {self.members.shape[1]} classes, from 0")
        return self.members.gather(1, y).squeeze(1)

    @property
    def sizes(self) -> Tensor:
        """The number of classes in each set, [N]."""
        return self.members.sum(1)


@dataclass(frozen=True, repr=False)
class Intervals(PredictionSets):
    """Intervals from `low` to `high`, [N, D]: boxes, if a target is D numbers. `sets[i]` is (low, high)."""

    size_name = "interval_width"
    low: Tensor
    high: Tensor

    def __len__(self) -> int:
        return len(self.low)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        low, high = self.low[row].tolist(), self.high[row].tolist()
        return (low[0], high[0]) if len(low) == 1 else (low, high)

    def covers(self, y: Any) -> Tensor:
        y = torch.as_tensor(y, device=self.low.device).double()
        _check_targets(y.numel(), self.low.numel())
        y = y.reshape(self.low.shape)
        inside: Tensor = ((self.low <= y) & (y <= self.high)).all(1)
        return inside

    @property
    def sizes(self) -> Tensor:
        """The width of each interval, a mean over its D numbers, [N]."""
        return (self.high - self.low).mean(1)


def _check_targets(found: int, wanted: int) -> None:
    if found != wanted:
        raise DataError(f"y must be the targets of the {wanted} predictions, and has {found}")


@dataclass(frozen=True)
class Classes:
    """Probabilities p and scores of all classes, [N, C]."""

    p: Tensor
    each: Tensor

    @classmethod
    def of(cls, p: Tensor, score: str) -> Classes:
        return cls(p, OF_CLASSES[score](p, shares(p)))

    def scores(self, y: Tensor) -> Tensor:
        return self.each.gather(1, y.long().reshape(-1, 1)).squeeze(1)

    def sets(self, threshold: Threshold) -> LabelSets:
        return LabelSets(threshold, self.each <= threshold.value)

    def naive(self, coverage: float) -> LabelSets:
        """The smallest sets with this probability."""
        ordered, order = self.p.sort(dim=-1, descending=True, stable=True)
        inside = ordered.cumsum(-1) - ordered < coverage
        return LabelSets(_naive(coverage), torch.zeros_like(inside).scatter_(-1, order, inside))


@dataclass(frozen=True)
class Numbers:
    """Means and standard deviations of predictive Gaussians, [N, D]."""

    mean: Tensor
    sd: Tensor

    def scores(self, y: Tensor) -> Tensor:
        return ((y.reshape(self.mean.shape).double() - self.mean).abs() / self.sd).amax(1)

    def sets(self, threshold: Threshold) -> Intervals:
        return self._within(threshold, threshold.value)

    def naive(self, coverage: float) -> Intervals:
        """The boxes with this probability, if the numbers of an example are independent."""
        return self._within(_naive(coverage), z_of(coverage ** (1 / self.mean.shape[1])))

    def _within(self, threshold: Threshold, deviations: float) -> Intervals:
        return Intervals(threshold, self.mean - deviations * self.sd, self.mean + deviations * self.sd)


def _naive(coverage: float) -> Threshold:
    return Threshold(coverage, coverage, "there is no guarantee: the belief is taken to be right")


def predicted(task: Task, prediction: Tensor, spread: Tensor | None, score: str) -> Classes | Numbers:
    """Predictions and their variance over networks, in double precision."""
    if score != OF_NUMBERS:
        return Classes.of(prediction.double(), score)
    sd = task.likelihood.sd(prediction, spread).double()
    mean = prediction if prediction.shape == sd.shape else prediction[..., 0]
    return Numbers(mean.double().reshape(len(mean), -1), sd.reshape(len(mean), -1))
