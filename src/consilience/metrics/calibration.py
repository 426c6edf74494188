"""Calibration: accuracy against confidence, in bins."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.errors import DataError


@dataclass(frozen=True)
class Reliability:
    """Top-label predictions in bins of equal width, bin b holding edges[b] ≤ confidence < edges[b + 1].

    `confidence` and `accuracy` are means over a bin, 0 where `count` is 0. Plain lists can be written as JSON."""

    edges: list[float]
    confidence: list[float]
    accuracy: list[float]
    count: list[int]

    @property
    def ece(self) -> float:
        """Expected calibration error Σ_b n_b/N · |accuracy_b − confidence_b|."""
        gaps = zip(self.count, self.accuracy, self.confidence, strict=True)
        return sum(n * abs(a - c) for n, a, c in gaps) / max(sum(self.count), 1)

    def __add__(self, other: Reliability) -> Reliability:
        """Both sets of predictions in one diagram, as if they had been binned together."""
        if self.edges != other.edges:
            raise DataError(f"cannot pool {len(self.count)} bins with {len(other.count)} others")
        count = [n + m for n, m in zip(self.count, other.count, strict=True)]

        def pool(ours: list[float], theirs: list[float]) -> list[float]:
            rows = zip(self.count, ours, other.count, theirs, count, strict=True)
            return [(n * a + m * b) / max(total, 1) for n, a, m, b, total in rows]

        confidence = pool(self.confidence, other.confidence)
        return Reliability(self.edges, confidence, pool(self.accuracy, other.accuracy), count)


def reliability(probs: Tensor, y: Tensor, bins: int = 15) -> Reliability:
    """Bin the top-label predictions of `probs` [N, C] by confidence; a confidence of 1 is in the last bin."""
    top, label = probs.max(dim=1)
    return binned(top, label == y, bins)


def binned(confidence: Tensor, right: Tensor, bins: int = 15) -> Reliability:
    """Bin claims by their confidence [N] with whether they are right [N]."""
    # On the CPU: a weighted bincount on a GPU adds in no fixed order.
    confidence, right = confidence.cpu().double(), right.cpu().double()
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    index = torch.bucketize(confidence, edges[1:-1].contiguous(), right=True)
    count = torch.bincount(index, minlength=bins)
    total = count.clamp(min=1)
    mean_confidence = torch.bincount(index, confidence, minlength=bins) / total
    mean_accuracy = torch.bincount(index, right, minlength=bins) / total
    return Reliability(edges.tolist(), mean_confidence.tolist(), mean_accuracy.tolist(), count.tolist())
