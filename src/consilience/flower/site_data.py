"""A site's examples, as its loader returns them and its policy rounds their numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from consilience.core import Tree
from consilience.data import Data, Dataset
from consilience.data.ragged import Ragged
from consilience.data.trees import Entry, map_entries
from consilience.flower.policy import Policy, SiteError


@dataclass(frozen=True)
class Parts:
    """A site's examples for training, for evaluation and for prediction sets."""

    train: Dataset
    test: Dataset | None = None
    calibration: Dataset | None = None

    @classmethod
    def of(cls, found: Dataset | Data, step: int) -> Parts:
        """The examples that the site uses: of each part the first, as many as the largest multiple of `step`, so that
        nothing which leaves the site tells how many more there are."""
        parts = (found.train, found.test, found.calibration) if isinstance(found, Data) else (found, None, None)
        if not len(parts[0]):
            raise SiteError("it has no examples to learn from")
        train, test, calibration = (_rounded(part, step) for part in parts)
        if train is None:
            raise SiteError(f"its policy has round_examples = {step}, and it has fewer examples")
        return cls(train, test, calibration)


def _rounded(data: Dataset | None, step: int) -> Dataset | None:
    most = size(data) // step * step
    return data if data is None or most == len(data) else data[torch.arange(most)] if most else None


def size(data: Dataset | None) -> int:
    """The number of examples, of no data 0."""
    return 0 if data is None else len(data)


def loaded(load: Callable[[], Any], policy: Policy) -> Any:
    """The data that `load` returns. A loader's own error may quote a patient's data, so it stays at the site."""
    with policy.errors("its data cannot be read"):
        return load()


def _form(column: Entry) -> Any:
    if isinstance(column, Ragged):
        settings = {"mask": column.mask, "lengths": column.lengths, "padding": column.padding}
        return {"values": _form(column.values), **settings}
    return str(column.dtype).removeprefix("torch."), list(column.shape[1:])


def form_of(tree: Tree) -> Any:
    """A `TreeForm` as plain data."""
    forms = map_entries(_form, tree)
    return list(forms) if isinstance(tree, tuple) else forms
