"""Augmentation of a cohort's images [K, B, C, H, W], with one key per client: a client's images do not depend on the
rest of the cohort. Inputs are normalised, so padding by zero is padding by the data set's mean.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from consilience.core import Count, DataError, Size, check_types, keys
from consilience.data.dataset import Dataset
from consilience.data.trees import form


@runtime_checkable
class Augmentation(Protocol):
    """A random change in training and its fixed counterpart in evaluation."""

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        """Images [K, B, C, H, W], changed at random by keys [K] on the same device."""

    def evaluation(self, x: Tensor) -> Tensor:
        """Images [..., C, H, W] as the model sees them in evaluation."""


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
class Compose:
    """Several augmentations in turn. The position enters the key, so the same one may occur twice."""

    steps: tuple[Augmentation, ...]

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        for position, step in enumerate(self.steps):
            x = step(x, keys.mix(key ^ position))
        return x

    def evaluation(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step.evaluation(x)
        return x


def _uniform(augmentation: Augmentation, key: Tensor, count: int) -> Tensor:
    """[K, count] in [0, 1) from a key of the augmentation's own: number b belongs to image b in any batch."""
    return keys.uniform(keys.fold(key, type(augmentation).__name__), count, torch.float32)


def check_augmentable(augmentation: Augmentation | None, data: Dataset) -> None:
    """Refuse augmentation of inputs that are not one tensor."""
    if augmentation is not None and not isinstance(data.x, Tensor):
        raise DataError(f"{data.name}: augmentation is for inputs of one tensor, and x is {form(data.x)}")
