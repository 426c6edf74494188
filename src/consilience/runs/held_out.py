"""Examples that are held out, for validation or for prediction sets."""

import torch
from torch import Tensor

from consilience.core import DataError
from consilience.data import Dataset, Federation
from consilience.data.trees import address


def check_unseen(
    used: Dataset | Federation, held_out: Dataset | Federation, what: str = "calibration", by: str = "training"
) -> None:
    """Refuse calibration or validation examples that are training examples too, or were `used` otherwise."""
    (ours, used_rows), (theirs, rows) = _place(used), _place(held_out)
    if len(rows) and ours == theirs and bool(torch.isin(rows, used_rows).any()):
        raise DataError(
            f"the {what} examples are {by} examples too, so the model would look better on them than it is: hold "
            "some out by Federation.split"
        )


def _place(examples: Dataset | Federation) -> tuple[int, Tensor]:
    """(the address of the data, the rows)."""
    if isinstance(examples, Federation):
        return address(examples.data.x), examples.order.cpu()
    return address(examples.x), torch.arange(len(examples))
