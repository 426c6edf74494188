"""Scores of all sites together, from sums: no site's own scores are known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from consilience.core import Weighted, record
from consilience.evaluation.scores import Evaluation
from consilience.flower.messages import Bins, EvaluateReply
from consilience.flower.scores import Counts, pool_scores
from consilience.metrics import ScoreCounts

ALL = "all sites"
Means = dict[str, Weighted]


@record
class BinSums:
    """A reliability diagram as sums: examples, Σ confidence and Σ right predictions by bin."""

    count: Tensor
    confidence: Tensor
    accuracy: Tensor


@record
class ScoreSums:
    """A site's scores times its number of examples, and everything else that adds up."""

    examples: Tensor
    point: Means
    marginal: Means | None
    reliability: BinSums | None
    marginal_reliability: BinSums | None
    counts: ScoreCounts | None
    marginal_counts: ScoreCounts | None


def sums_of(examples: int, found: Evaluation) -> ScoreSums:
    """The sums of an evaluation on this number of examples. A score without a value, such as an AUROC of one class,
    adds nothing."""
    return ScoreSums(
        torch.tensor([examples]),
        _means(examples, found.point),
        None if found.marginal is None else _means(examples, found.marginal),
        _bins(found.reliability),
        _bins(found.marginal_reliability),
        found.counts,
        found.marginal_counts,
    )


def evaluation_of(total: ScoreSums, template: Evaluation) -> Evaluation | None:
    """The evaluation of all sites together, from their sums; None if they have no examples."""
    examples = int(total.examples)
    if not examples:
        return None
    reply = EvaluateReply(
        examples=examples,
        point=_values(total.point),
        marginal=None if total.marginal is None else _values(total.marginal),
        reliability=_diagram(total.reliability, template.reliability),
        marginal_reliability=_diagram(total.marginal_reliability, template.marginal_reliability),
    )
    counts: Counts = {}
    if total.counts is not None:
        counts["counts"] = total.counts
    if total.marginal_counts is not None:
        counts["marginal_counts"] = total.marginal_counts
    pooled = pool_scores({ALL: reply}, template.belief, counts={ALL: counts} if counts else {})
    return None if pooled is None else replace(pooled, clients=[])


def _means(examples: int, scores: dict[str, float]) -> Means:
    def one(value: float) -> Weighted:
        n = float(examples) if math.isfinite(value) else 0.0
        return Weighted(*torch.tensor([[n * value if n else 0.0], [n]], dtype=torch.float64))

    return {name: one(scores[name]) for name in sorted(scores)}


def _values(means: Means) -> dict[str, float]:
    return {name: float(mean.total / mean.weight) if mean.weight > 0 else math.nan for name, mean in means.items()}


def _bins(found: dict[str, Any] | None) -> BinSums | None:
    if found is None:
        return None
    count = torch.tensor(found["count"])
    confidence, accuracy = (
        torch.tensor(found[name], dtype=torch.float64) * count for name in ("confidence", "accuracy")
    )
    return BinSums(count, confidence, accuracy)


def _diagram(sums: BinSums | None, template: dict[str, Any] | None) -> Bins | None:
    if sums is None or template is None:
        return None
    some = sums.count.clamp_min(1)
    confidence, accuracy = ((part / some).clamp(0, 1).tolist() for part in (sums.confidence, sums.accuracy))
    return Bins(edges=template["edges"], confidence=confidence, accuracy=accuracy, count=sums.count.tolist())
