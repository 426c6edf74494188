"""Scores that sites give the model on what they hold out: believed if they can be, and made one."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import reduce
from typing import Any

from consilience.core.errors import RecordError
from consilience.evaluation.scores import Evaluation
from consilience.flower.letters import Bins, Marks
from consilience.metrics.calibration import Reliability


def credible(marks: Marks, like: Evaluation, held_out: int) -> Marks:
    """Marks with the very scores and diagrams of `like`, of no more examples than the site said it holds out; else a
    RecordError."""
    for scores, bins, wanted, diagram in (
        (marks.point, marks.reliability, like.point, like.reliability),
        (marks.marginal, marks.marginal_reliability, like.marginal, like.marginal_reliability),
    ):
        if (scores is None) != (wanted is None) or set(scores or ()) != set(wanted or ()):
            raise RecordError("its scores are not those of the task")
        if (bins is None) != (diagram is None) or not (bins is None or _fits(bins, diagram, marks.examples)):
            raise RecordError("its reliability diagram is not one of its examples")
    if not 0 < marks.examples <= held_out:
        raise RecordError(f"it scored {marks.examples} examples, and holds out {held_out}")
    return marks


def _fits(bins: Bins, diagram: dict[str, Any] | None, examples: int) -> bool:
    edges = [] if diagram is None else diagram["edges"]
    right = len(bins.confidence) == len(bins.accuracy) == len(bins.count) == len(edges) - 1
    return right and bins.edges == edges and sum(bins.count) == examples


def pooled(marks: dict[str, Marks], belief: str) -> Evaluation | None:
    """Many sites' scores of a belief of this kind as one: the mean by their numbers of held-out examples, but for the
    calibration error, which is that of all predictions together. R², F1 and the like are means of what sites have."""
    if not marks:
        return None
    sites = list(marks.values())
    marginal = all(site.marginal is not None for site in sites)
    bins = [_pool([site.reliability for site in sites]), _pool([site.marginal_reliability for site in sites])]
    clients = [{"name": name, "examples": site.examples, "metrics": site.point} for name, site in marks.items()]
    return Evaluation(
        _mean([(site.examples, site.point) for site in sites], bins[0]),
        _mean([(site.examples, site.marginal or {}) for site in sites], bins[1]) if marginal else None,
        clients,
        bins[0] if bins[0] is None else asdict(bins[0]),
        bins[1] if bins[1] is None else asdict(bins[1]),
        belief=belief,
    )


def _pool(bins: list[Bins | None]) -> Reliability | None:
    found = [Reliability(**one.model_dump()) for one in bins if one is not None]
    return reduce(lambda a, b: a + b, found) if len(found) == len(bins) else None


def _mean(scores: list[tuple[int, dict[str, float]]], bins: Reliability | None) -> dict[str, float]:
    """By examples, of the sites where a score has a value: R² has none on one example."""
    means = {}
    for name in scores[0][1]:
        told = [(n, values[name]) for n, values in scores if math.isfinite(values[name])]
        means[name] = sum(n * value for n, value in told) / sum(n for n, _ in told) if told else math.nan
    return means | ({"ece": bins.ece} if bins is not None else {})
