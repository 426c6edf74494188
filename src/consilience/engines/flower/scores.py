"""Scores that sites give the model on what they hold out: believed if they can be, and made one."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import reduce

from consilience.engines.flower.letters import Bins, Marks
from consilience.errors import RecordError
from consilience.evaluation import Evaluation
from consilience.metrics.calibration import Reliability


def credible(marks: Marks, like: Evaluation, held_out: int) -> Marks:
    """Marks with the scores and bins of `like`, on no more examples than the site said it holds out; else a
    RecordError."""
    for scores in (marks.point, marks.marginal):
        if scores is not None and marks.examples and set(scores) != set(like.point):
            raise RecordError("its scores are not those of the task")
    for bins in (marks.reliability, marks.marginal_reliability):
        if bins is not None and not _fits(bins, like):
            raise RecordError("its reliability diagram has other bins")
    return marks.model_copy(update={"examples": min(marks.examples, held_out)})


def _fits(bins: Bins, like: Evaluation) -> bool:
    if like.reliability is None or bins.edges != like.reliability["edges"]:
        return False
    return len(bins.confidence) == len(bins.accuracy) == len(bins.count) == len(bins.edges) - 1


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
