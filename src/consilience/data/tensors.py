"""Arrays, tables and lists of numbers as tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilience.core.errors import DataError

IGNORED = -100
"""The label of places that have no target, as torch's cross-entropy has it."""


def starts(sizes: Tensor) -> Tensor:
    """Where each of several pieces begins that lie one after another, and the end: [N + 1] for sizes [N]."""
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def to_tensor(value: Any, what: str) -> Tensor:
    """`value` as a tensor, sharing its memory if possible. Float64 that is not a tensor gets torch's default type."""
    found = _tensor(value, what)
    if found is value or found.dtype != torch.float64:
        return found
    return found.to(torch.get_default_dtype())


def to_ids(value: Any, what: str) -> Tensor:
    """Ids of clients or groups, one for each example, as [N] int64."""
    ids = _tensor(value, what)
    if ids.dim() != 1 or (ids.is_floating_point() and not bool((ids == ids.long()).all())):
        raise DataError(f"{what} must be whole numbers [N], one for each example")
    return ids.long()


def _tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if not (hasattr(value, "__array__") or isinstance(value, Sequence | int | float)):
        raise DataError(
            f"{what} must be a tensor, an array, a table or a list of numbers, not a {type(value).__name__}: "
            "Dataset.of(…) reads a torch Dataset, a DataLoader, a DataFrame or a Hugging Face data set"
        )
    try:
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{what} must be numbers in rows of one length ({str(error).split('. ')[0]}): number names by "
            "numpy.unique(…, return_inverse=True), make a table's columns of one type by .astype(float), and hold rows "
            "of different lengths in a Ragged(rows)"
        ) from error
