"""Class names and numbers as labels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from consilience.core.errors import DataError, nearest
from consilience.data.tables.numbers import spelled


def class_numbers(labels: Sequence[str], classes: Sequence[str], where: str) -> Tensor:
    """[N] numbers of classes. A label is a name or, if no name is itself a number, a number 0, 1, …"""
    plain = [spelled(label) for label in labels]
    code = {spelled(name): number for number, name in enumerate(classes)}
    if not any(name.isdecimal() for name in code) and all(label.isdecimal() for label in plain):
        code = {str(number): number for number in range(len(classes))}
    for label in plain:
        if label not in code:
            raise DataError(f"{where}: {label!r} is no class of this federation; {nearest(label, code)}")
    return torch.tensor([code[label] for label in plain], dtype=torch.int64)
