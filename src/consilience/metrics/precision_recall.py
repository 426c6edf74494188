"""Precision and recall of generated samples."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.checks import Count, check_types
from consilience.data.dataset import Dataset
from consilience.metrics.judge import check_alike, check_some, counted, examples, finite, flat


@dataclass(frozen=True, eq=False)
class PrecisionRecall:
    """Improved precision and recall (Kynkäänniemi et al., 2019).

    A set covers the balls around its points with the distance to their `neighbours`-th nearest neighbour as radius.
    Precision is the share of samples that (at most `count`) real examples cover, recall the share of real examples that
    samples cover. Distances are between inputs, or between their `features`. A sample that is not finite is not covered
    and covers nothing."""

    neighbours: Count = 5
    count: Count = 2000
    features: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        check_types(self)

    @torch.no_grad()
    def __call__(self, samples: Tensor, real: Dataset) -> dict[str, float]:
        """ "precision" and "recall", both from 0 to 1, as `counted` names them."""
        check_some(samples)
        true = self._rows(examples(real, self.count).to(samples.device))
        made = finite(samples)
        if not len(made):
            return counted({"precision": 0.0, "recall": 0.0}, samples)
        made = finite(self._rows(made))
        check_alike(made, true.shape[1])
        scores = {
            "precision": int(_covered(made, true, self.neighbours).sum()) / len(samples),
            "recall": int(_covered(true, made, self.neighbours).sum()) / len(true),
        }
        return counted(scores, samples)

    def _rows(self, x: Tensor) -> Tensor:
        return flat(x if self.features is None else self.features(x))


def _covered(points: Tensor, by: Tensor, neighbours: int) -> Tensor:
    """True for points in a ball around one of `by` with the distance to its `neighbours`-th nearest neighbour there as
    radius, or to the farthest if there are fewer. A single point covers itself."""
    if not len(by):
        return torch.zeros(len(points), dtype=torch.bool)
    radii = by.new_zeros(1)
    if len(by) > 1:
        nearest = _squares(by, by).fill_diagonal_(math.inf).topk(min(neighbours, len(by) - 1), largest=False).values
        radii = nearest.amax(dim=1)
    # Balls are closed: a point on the edge is inside, however its distance was rounded.
    return (_squares(points, by) <= radii * (1 + 1e-9)).any(dim=1)


def _squares(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances [len(a), len(b)] by products, forty times as fast as by differences; in float64 and 0 where
    smaller than rounding, so that equal points have distance 0."""
    centre = b.mean(dim=0, dtype=torch.float64)
    a, b = a - centre, b - centre
    sizes = a.square().sum(dim=1)[:, None] + b.square().sum(dim=1)
    squares = sizes - 2 * a @ b.T
    return squares.masked_fill_(squares < 1e-12 * sizes, 0)
