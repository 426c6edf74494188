"""Counts of scores by class in public bins: they add up over clients, and the AUROC of all scores follows from them."""

from __future__ import annotations

import torch
from torch import Tensor

from consilience.core import record

# As probabilities, 1,000 bins of equal width on the logit scale, of which the outer two have no end; ½ is an edge.
EDGES = (torch.arange(-499, 500, dtype=torch.float64) / 50).sigmoid()


@record
class ScoreCounts:
    """Examples of class 0 and of class 1 by the bin of their probability of class 1, [2, 1000].

    The order of two scores in different bins is known, that of two in the same bin is not. So the area under the ROC
    curve is known up to half the share of pairs of both classes that have the same bin."""

    counts: Tensor

    @classmethod
    def of(cls, probs: Tensor, y: Tensor) -> ScoreCounts:
        """The counts of probabilities [N, 2] and labels [N]."""
        places = torch.bucketize(probs[:, 1].contiguous().double().cpu(), EDGES)
        flat = torch.bincount(y.cpu().long() * (len(EDGES) + 1) + places, minlength=2 * (len(EDGES) + 1))
        return cls(flat.view(2, -1))

    def __add__(self, other: ScoreCounts) -> ScoreCounts:
        return ScoreCounts(self.counts + other.counts)

    def weighted(self, share: float) -> ScoreCounts:
        """Every example as this share of one."""
        return ScoreCounts(self.counts.double() * share)

    @property
    def examples(self) -> int:
        """The number of examples."""
        return int(self.counts.sum())

    def auroc(self) -> tuple[float, float]:
        """(area, largest error): the exact area lies within this distance of it. nan if a class is missing."""
        negative, positive = self.counts.double()
        pairs = negative.sum() * positive.sum()
        below = negative.cumsum(0) - negative
        same = (negative * positive).sum() / 2
        return float(((below * positive).sum() + same) / pairs), float(same / pairs)

    def balanced_accuracy(self) -> float:
        """The mean share of right predictions of both classes, at the threshold ½; nan if a class is missing."""
        half = int((EDGES <= 0.5).sum())
        negative, positive = self.counts.double()
        return float((negative[:half].sum() / negative.sum() + positive[half:].sum() / positive.sum()) / 2)
