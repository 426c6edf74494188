"""What a site adds to a round under secure aggregation: its update, and all that goes with it, as one record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from consilience.core import Weighted, record
from consilience.core.records import Tree, tree_map


@record
class Contribution:
    """A site's update; 1, or 0 if the site withholds its update and adds nothing; its notes, such as its loss, weighted
    by its examples; and how often its guards acted."""

    update: Tree
    took_part: Tensor
    notes: dict[str, Weighted]
    guards: Tensor

    @classmethod
    def of(cls, update: Tree, notes: Mapping[str, float], examples: int, guards: Mapping[str, int]) -> Contribution:
        """The contribution of a site that takes part. A note that is not finite adds nothing."""
        weighted = {name: _weighted(notes[name], examples) for name in sorted(notes)}
        return cls(update, torch.tensor([1]), weighted, torch.tensor([sum(guards.values())]))

    @classmethod
    def withheld(cls, update: Tree, notes: Iterable[str]) -> Contribution:
        """The contribution of a site that withholds an update of this form: zeros."""
        nothing = {name: _weighted(0.0, 0) for name in sorted(notes)}
        return cls(tree_map(torch.zeros_like, update), torch.tensor([0]), nothing, torch.tensor([0]))

    def means(self) -> dict[str, float]:
        """The means of the notes, after the contributions of all sites were added."""
        return {name: float(note.total / note.weight) for name, note in self.notes.items() if note.weight > 0}


def _weighted(value: float, examples: int) -> Weighted:
    n = examples if math.isfinite(value) else 0
    total, weight = torch.tensor([[value * n if n else 0.0], [n]], dtype=torch.float64)
    return Weighted(total, weight)
