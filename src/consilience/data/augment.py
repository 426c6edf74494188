"""Augmentation of a cohort's images [K, B, C, H, W] or sequences [K, B, T, F], with one key per client: a client's
examples do not depend on the rest of the cohort. Inputs are normalised, so padding by zero is padding by the data set's
mean.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from consilience.core import Count, DataError, Fraction, Size, check_types, keys
from consilience.data.dataset import Dataset
from consilience.data.ragged import Ragged
from consilience.data.rows import Rows
from consilience.data.trees import form


@runtime_checkable
class Augmentation(Protocol):
    """A random change in training and its fixed counterpart in evaluation."""

    def __call__(self, x: Any, key: Tensor) -> Any:
        """Images [K, B, C, H, W], changed at random by keys [K] on the same device. An augmentation with the attribute
        `ragged = True` is for sequences: the pair of values [K, B, T, F] and lengths [K, B]."""

    def evaluation(self, x: Any) -> Any:
        """Images [..., C, H, W], or sequences with their lengths, as the model sees them in evaluation."""


@dataclass(frozen=True)
class Crop:
    """A random `size` × `size` window of the image padded by `padding` zeros on each side; in evaluation the central
    window."""

    size: Count
    padding: Size = 0

    def __post_init__(self) -> None:
        check_types(self)

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        self._check(x)
        x = F.pad(x, (self.padding,) * 4)
        clients, batch, channels, height, width = x.shape
        corners = _uniform(self, key, 2 * batch).view(clients, batch, 2)
        window = torch.arange(self.size, device=x.device)
        rows = (corners[..., 0] * (height - self.size + 1)).long()[..., None] + window
        columns = (corners[..., 1] * (width - self.size + 1)).long()[..., None] + window
        x = x.gather(3, rows[:, :, None, :, None].expand(-1, -1, channels, -1, width))
        return x.gather(4, columns[:, :, None, None, :].expand(-1, -1, channels, self.size, -1))

    def evaluation(self, x: Tensor) -> Tensor:
        self._check(x)
        height, width = x.shape[-2:]
        top, left = (height - self.size) // 2, (width - self.size) // 2
        return F.pad(x, (-left, self.size - width + left, -top, self.size - height + top))  # negative padding crops

    def _check(self, x: Tensor) -> None:
        height, width = x.shape[-2:]
        if self.size > min(height, width) + 2 * self.padding:
            raise DataError(f"Crop(size={self.size}, padding={self.padding}) is larger than images of {width}×{height}")


@dataclass(frozen=True)
class Flip:
    """A left–right flip with probability ½; none in evaluation."""

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        flipped = _uniform(self, key, x.shape[1]) < 0.5
        return torch.where(flipped[..., None, None, None], x.flip(-1), x)

    def evaluation(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Standardize:
    """Every image with mean 0 and standard deviation 1 over its pixels and channels, in training and evaluation. As in
    TensorFlow, deviations below 1/√(numbers of an image) count as that, so that an image of one colour becomes 0."""

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        return self.evaluation(x)

    def evaluation(self, x: Tensor) -> Tensor:
        deviation, mean = torch.std_mean(x, dim=(-3, -2, -1), correction=0, keepdim=True)
        return (x - mean) / deviation.clamp_min(x.shape[-3:].numel() ** -0.5)


@dataclass(frozen=True)
class SpecAugment:
    """Sequences of features with bands and times set to 0 (Park et al., 2019): `bands` stripes of up to `band_width`
    neighbouring features, and `times` stripes of up to `time_width` steps, at most the share `longest` of a sequence.
    None in evaluation. For inputs that are one `Ragged` with lengths."""

    bands: Size = 2
    band_width: Size = 8
    times: Size = 2
    time_width: Size = 25
    longest: Fraction = 0.15
    ragged: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_types(self)

    def __call__(self, x: tuple[Tensor, Tensor], key: Tensor) -> tuple[Tensor, Tensor]:
        values, lengths = x
        clients, batch, steps, features = values.shape
        stripes = self.bands + self.times
        drawn = _uniform(self, key, 2 * stripes * batch).view(clients, batch, stripes, 2)
        whole = lengths.unsqueeze(-1).to(drawn.dtype)
        time_width = (self.longest * whole).clamp(max=self.time_width)
        band_width = drawn.new_full((), min(self.band_width, features))
        band = _stripes(drawn[..., : self.bands, :], band_width, features, features)
        time = _stripes(drawn[..., self.bands :, :], time_width, whole, steps)
        return values.masked_fill(time.unsqueeze(-1) | band.unsqueeze(-2), 0.0), lengths

    def evaluation(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return x


def _stripes(drawn: Tensor, width: Tensor, whole: Tensor | float, size: int) -> Tensor:
    """Places [..., size] that lie in any of M stripes, by two uniform numbers each [..., M, 2]: a width of up to
    `width` of `whole` places, and a start."""
    widths = (drawn[..., 0] * (width + 1)).floor()
    starts = (drawn[..., 1] * (whole - widths + 1)).floor().unsqueeze(-1)
    place = torch.arange(size, device=drawn.device)
    return ((place >= starts) & (place < starts + widths.unsqueeze(-1))).any(-2)


@dataclass(frozen=True)
class Compose:
    """Several augmentations in turn. The position enters the key, so the same one may occur twice."""

    steps: tuple[Augmentation, ...]

    @property
    def ragged(self) -> bool:
        """Whether its steps are for sequences."""
        return any(getattr(step, "ragged", False) for step in self.steps)

    def __call__(self, x: Any, key: Tensor) -> Any:
        for position, step in enumerate(self.steps):
            x = step(x, keys.mix(key ^ position))
        return x

    def evaluation(self, x: Any) -> Any:
        for step in self.steps:
            x = step.evaluation(x)
        return x


def _uniform(augmentation: Augmentation, key: Tensor, count: int) -> Tensor:
    """[K, count] in [0, 1) from a key of the augmentation's own: number b belongs to image b in any batch."""
    return keys.uniform(keys.fold(key, type(augmentation).__name__), count, torch.float32)


def check_augmentable(augmentation: Augmentation | None, data: Dataset) -> None:
    """Refuse augmentation of inputs that it is not for."""
    if augmentation is None:
        return
    if getattr(augmentation, "ragged", False):
        x = data.x
        if not (isinstance(x, Ragged) and x.dim() == 3 and x.lengths and not x.mask):
            raise DataError(
                f"{data.name}: this augmentation is for one Ragged of features [T, F] with lengths=, and x is {form(x)}"
            )
    elif not isinstance(data.x, Tensor | Rows):
        raise DataError(f"{data.name}: augmentation is for inputs of one tensor, and x is {form(data.x)}")
