"""A column of a source: numbers, images, vectors or lists as an array, a tensor, a list or a Ragged."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from consilience.core.errors import DataError
from consilience.data.ragged import Ragged

_DEEP = ("I;16", "I;16B", "I;16L", "I", "F")  # pillow's modes of more than eight bits a pixel


def column_input(column: Any) -> tuple[Any, float | None]:
    """(a column of inputs, its scale): images become bytes."""
    column = column_values(column)
    if isinstance(column, list) and column and isinstance(column[0], Image):
        return _stacked([pixels_of(image, "an image") for image in column]), 1 / 255
    return column, None


def pixels_of(image: Image, what: str) -> Any:
    """An image as bytes [C, H, W], grey or in colours."""
    if image.mode in _DEEP:
        raise DataError(f"{what} has more than eight bits a pixel: convert all images to eight bits in the same way")
    pixels = np.array(image.convert("L" if image.mode in ("1", "L") else "RGB"))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def column_values(column: Any) -> Any:
    """A column as an array, a tensor, a list of images or numbers, or, if its cells differ in length, a Ragged."""
    if isinstance(column, Tensor | Ragged):
        return column
    if hasattr(column, "__array__"):
        array = np.asarray(column)
        if array.dtype != object:
            return array
        column = array.tolist()
    values = list(column)
    if not values or isinstance(values[0], Image) or not isinstance(values[0], Tensor | np.ndarray | list | tuple):
        return values
    if isinstance(values[0], Tensor | np.ndarray):
        alike = len({tuple(value.shape) for value in values}) == 1
        lengths_only = values[0].ndim and len({tuple(value.shape[1:]) for value in values}) == 1
        return Ragged(values) if lengths_only and not alike else _stacked(values)
    if not all(isinstance(value, Sequence) for value in values):
        raise DataError("some cells of a column are lists and others are not: fill them in or drop the rows first")
    return values if len(set(map(len, values))) == 1 else Ragged(values)


def _stacked(values: Sequence[Any]) -> Tensor:
    if len(shapes := {tuple(value.shape) for value in values}) > 1:
        first, other = sorted(shapes)[:2]
        raise DataError(f"examples must have one shape, found {first} and {other}: crop or pad them first")
    return torch.stack([torch.as_tensor(value) for value in values])
