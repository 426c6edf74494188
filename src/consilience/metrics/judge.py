"""Judge: a score of generated samples; and what judges share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from consilience.core.errors import DataError
from consilience.data.dataset import Dataset
from consilience.metrics.scores import at_least_float32


class Judge(Protocol):
    """Scores `samples` [N, ...] in the units of `real.inputs(index)`."""

    @property
    def count(self) -> int:
        """The number of samples to judge."""

    def __call__(self, samples: Tensor, real: Dataset) -> dict[str, float]:
        """Scores by name."""


def pixels(samples: Tensor, real: Dataset) -> Tensor:
    """(x − shift)/scale, clamped to 0..255: the pixels of model inputs."""
    if real.scale is None:
        raise DataError(f"{real.name} has no scale from pixels to inputs, so it does not hold images")
    x = at_least_float32(samples)
    return ((x if real.shift is None else x - real.shift.to(x)) / real.scale.to(x)).clamp(0, 255)


def spaced(real: Dataset, count: int) -> Tensor:
    """The rows of at most `count` examples, at even spacing."""
    if not len(real):
        raise DataError(f"{real.name} has no examples to compare samples with")
    chosen = min(count, len(real))
    return torch.arange(chosen, device=real.device) * len(real) // chosen


def examples(real: Dataset, count: int) -> Tensor:
    """The inputs of at most `count` examples, at even spacing."""
    found: Tensor = real.inputs(spaced(real, count))
    return found


def flat(x: Tensor) -> Tensor:
    """[N, ...] as [N, D], in float32 or float64."""
    return at_least_float32(x).reshape(len(x), -1)


def finite(x: Tensor) -> Tensor:
    """The rows that are finite."""
    return x[x.reshape(len(x), -1).isfinite().all(dim=1)]


def counted(scores: dict[str, float], samples: Tensor) -> dict[str, float]:
    """Scores by names with the number of samples: "fid@10000". They depend on it."""
    return {f"{name}@{len(samples)}": value for name, value in scores.items()}


def check_some(samples: Tensor) -> None:
    """Refuse an empty set of samples."""
    if not samples.numel():
        raise DataError("there are no samples to judge")


def check_alike(rows: Tensor, width: int) -> None:
    """Refuse rows [N, D] with another number of coordinates than the data."""
    if rows.shape[1] != width:
        raise DataError(f"samples have {rows.shape[1]} coordinates, but the data have {width}")


def fair_shares(labels: Tensor, kinds: int, total: int) -> Tensor:
    """The number of samples with each label, relative to the fair share total/kinds."""
    return torch.bincount(labels, minlength=kinds).double() * kinds / total


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put the module and its parts in evaluation mode inside a `with` block, and restore each afterwards."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
