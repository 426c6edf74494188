"""Likelihood: the distribution of a target given a network's output, and tallies of its scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from consilience.core import DataError, TaskError, keys
from consilience.data.dataset import Dataset
from consilience.data.rows import Rows
from consilience.data.tensors import IGNORED as IGNORED


class Tally(ABC):
    """What scores need of some predictions. Tallies of batches and of clients add up."""

    @abstractmethod
    def __add__(self, other: Self) -> Self:
        """The tally of both sets of predictions."""

    @abstractmethod
    def scores(self) -> dict[str, float]:
        """The metrics of all predictions."""


@dataclass(frozen=True)
class Likelihood(ABC):
    """The distribution of a target given a network's output.

    An output is a tensor [B, ...], or a tuple of them where `trees` is true."""

    kind: ClassVar[str]
    trees: ClassVar[bool] = False
    """Whether the module may return several tensors."""
    categorical: ClassVar[bool] = False
    """Whether predictions are probabilities of classes [N, C]: they have entropies and a reliability diagram."""
    gaussian: ClassVar[bool] = False
    """Whether the predictive distribution is a Gaussian with the deviation `sd`."""
    spreads: ClassVar[bool] = False
    """Whether scores use the variance of predictions over networks."""
    streams: ClassVar[bool] = False
    """Whether predictions are large: evaluation scores them batch by batch and keeps none."""
    ratio: ClassVar[str | None] = None
    """What e^coefficient of a linear module is, such as "odds ratio"; empty if a coefficient is an effect as it is, and
    None if it has no meaning of its own."""
    probed: ClassVar[int] = 2
    """The number of examples that `check` looks at."""

    @property
    def whole_batch(self) -> bool:
        """Whether the loss of an example depends on the others of its batch; `losses` may then return one number."""
        return False

    @property
    def averages(self) -> bool:
        """Whether predictions may be averaged over networks."""
        return True

    @abstractmethod
    def losses(self, output: Any, y: Tensor) -> Tensor:
        """−log p(y | output) of each example, [B]."""

    @abstractmethod
    def draw(self, output: Any, key: Tensor) -> Tensor:
        """Targets drawn from p(y | output), for Fisher information."""

    def roots(self, output: Any) -> Tensor | None:
        """Vectors s_r [R, B, …] with Σ_r s_r s_rᵀ the Fisher information of each example's output, E_y of ∂ log p(y |
        output) times its transpose; None if there is no such formula."""
        return None

    @abstractmethod
    def predictive(self, output: Any) -> Tensor:
        """The mean of p(y | output), or another quantity that may be averaged over networks."""

    @abstractmethod
    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        """Metrics of predictions. If these are means over several networks, `spread` is the variance over them."""

    def resampled(self, prediction: Any, y: Any, spread: Tensor | None, weights: Tensor) -> dict[str, Tensor]:
        """The scores of bootstrap samples, [R] each: in sample r, example n occurs `weights[r, n]` times."""
        given = (prediction, y) if spread is None else (prediction, y, spread)
        found = [self.scores(*some) for some in samples(given, weights)]
        return {name: torch.tensor([one[name] for one in found], dtype=torch.float64) for name in found[0]}

    @abstractmethod
    def check(self, output: Any, data: Dataset) -> None:
        """Raise a DataError if the targets do not fit the output."""

    def places(self, output: Any) -> Tensor | None:
        """Which places of the sequences [B, T] exist, where the output says so; None if all do."""
        return None

    def masked(self, drawn: Tensor, y: Tensor) -> Tensor:
        """Drawn targets without those that are not counted in y."""
        return drawn

    def tally(self, prediction: Any, y: Tensor, spread: Tensor | None = None) -> Tally:
        """The tally of a batch: by default, the predictions themselves."""
        return Predictions(self, ((prediction, y, spread),))

    def shown(self, prediction: Any) -> Any:
        """The quantity that own metrics are computed from."""
        return prediction

    def sd(self, prediction: Tensor, spread: Tensor | None = None) -> Tensor:
        """The standard deviation of the predictive Gaussian."""
        raise TaskError(f"a predictive standard deviation is not defined for {self.kind}")

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """The same likelihood with its tensors on a device."""
        return self

    def settings(self) -> dict[str, Any]:
        """The settings that are not the defaults, as plain data: a run is resumed with the same only."""
        values = {field.name: (plain(getattr(self, field.name)), plain(field.default)) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}


@dataclass(frozen=True)
class Predictions(Tally):
    """Predictions that are kept: (prediction, y, spread) of each batch."""

    likelihood: Likelihood
    parts: tuple[tuple[Any, Any, Tensor | None], ...]

    def __add__(self, other: Predictions) -> Predictions:
        return Predictions(self.likelihood, (*self.parts, *other.parts))

    @cached_property
    def prediction(self) -> Any:
        """All predictions [N, ...]."""
        return _joined([prediction for prediction, _, _ in self.parts])

    @cached_property
    def y(self) -> Any:
        return _joined([y for _, y, _ in self.parts])

    @cached_property
    def spread(self) -> Tensor | None:
        spreads = [spread for _, _, spread in self.parts if spread is not None]
        return torch.cat(spreads) if spreads else None

    def scores(self) -> dict[str, float]:
        return self.likelihood.scores(self.prediction, self.y, self.spread)

    @property
    def of_classes(self) -> bool:
        """Whether these are probabilities of classes [N, C] and labels [N]."""
        prediction = self.prediction
        fits: bool = self.likelihood.categorical and prediction.dim() == 2 and self.y.shape == prediction.shape[:1]
        return fits


def _joined(trees: Sequence[Any]) -> Any:
    return tree_map(lambda *found: torch.cat(found), *trees)


def samples(trees: tuple[Any, ...], weights: Tensor) -> Iterator[tuple[Any, ...]]:
    """Bootstrap samples of rows: in sample r, row n occurs `weights[r, n]` times."""
    for times in weights.long():
        rows = torch.arange(len(times), device=times.device).repeat_interleave(times)
        yield tree_map(lambda leaf, rows=rows: leaf[rows], trees)


def plain(value: Any) -> Any:
    """A setting as plain data; a function by its name."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    return getattr(value, "__qualname__", repr(value)) if callable(value) else value


def choose(probs: Tensor, key: Tensor) -> Tensor:
    """A class drawn for each row of probabilities [..., C]. A draw depends on its place along each axis and not on the
    lengths of the axes, so that padding of a batch to other lengths leaves it as it is."""
    *outer, last, classes = probs.shape
    for length in outer:
        key = keys.bits(key, length)
    u = keys.uniform(key, last, probs.dtype).unsqueeze(-1)
    return (probs.cumsum(-1) <= u).sum(-1).clamp_max(classes - 1)


def targets_in_memory(data: Dataset) -> Tensor:
    """The targets of all examples; a DataError if they are read by index."""
    if isinstance(data.y, Rows):
        raise DataError(
            f"{data.name}: all targets are checked before a run, and these are read by index: pass them as an array, "
            "y = numpy.array(y), which is held in memory"
        )
    y: Tensor = data.y
    return y


def check_labels(data: Dataset, kind: str, classes: int, because: str) -> None:
    """Refuse labels other than whole numbers [N] in 0..classes − 1."""
    if data.y.dim() != 1 or data.y.dtype != torch.int64:
        raise DataError(
            f"{data.name}: {kind} needs labels [N] of type torch.int64, got {data.y.dtype} {data.y.dim()}-d"
            + (": for numbers to predict, the task is regression" if data.y.is_floating_point() else "")
        )
    low, high = int(data.y.min()), int(data.y.max())
    if not 0 <= low <= high < classes:
        raise DataError(
            f"{data.name}: labels lie in {low}..{high}, but {because} (labels 0..{classes - 1} are allowed)"
        )
