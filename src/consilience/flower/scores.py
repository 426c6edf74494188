"""Scores that sites give the model on their held-out examples: checked one by one, then pooled."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import Any

from flwr.app import RecordDict

from consilience.core import RecordError, unpack
from consilience.evaluation.scores import Evaluation
from consilience.flower.coordinator import Coordinator
from consilience.flower.messages import Bins, EvaluateReply, decode, longest_record
from consilience.flower.updates import most_examples
from consilience.metrics import Reliability, ScoreCounts, bounds

log = logging.getLogger("consilience")
ROUNDING = 1e-5
Counts = dict[str, ScoreCounts]
"""A site's counts of scores, by the names of their records."""


def evaluate_at_sites(
    coordinator: Coordinator,
    names: tuple[str, ...],
    content: Callable[[str], RecordDict],
    template: Evaluation,
) -> Evaluation | None:
    """The pooled scores of all online sites that hold examples out; None if there are none. `content(name)` is the
    request to a site. `template` is an evaluation of such a belief, which shows the scores that sites must send."""
    infos = {name: coordinator.online[name][1] for name in coordinator.available(names)}
    held_out = {name: info.held_out for name, info in infos.items() if info.held_out}
    replies: dict[str, EvaluateReply] = {}
    counts: dict[str, Counts] = {}
    longest = 0 if template.counts is None else longest_record(template.counts)
    for name, reply in coordinator.ask("evaluate", held_out, content, coordinator.participation.timeout, longest):
        try:
            scored, records = decode(reply, EvaluateReply, longest)
            found = check_scores(scored, template, held_out[name])
            counts[name] = check_counts(found, records, template)
            replies[name] = found
        except RecordError as error:
            log.warning("the scores of %r are rejected: %s", name, error)
    if template.counts is not None and (kept := sorted(name for name in replies if not counts[name])):
        log.warning("the AUROC is a mean of the sites' own: %s keep their counts", ", ".join(map(repr, kept)))
    most = coordinator.participation.max_examples or most_examples(reply.examples for reply in replies.values())
    for name in [name for name, reply in replies.items() if reply.examples > most and name not in coordinator.capped]:
        coordinator.capped.add(name)
        log.warning("%r scored %d examples: it counts for %d in the means", name, replies[name].examples, most)
    return pool_scores({name: replies[name] for name in sorted(replies)}, template.belief, most, counts)


def check_scores(reply: EvaluateReply, template: Evaluation, held_out: int) -> EvaluateReply:
    """The reply, if it has the scores and diagrams of `template`, in their ranges, and no more than `held_out`
    examples; else a RecordError."""
    for scores, bins, wanted, diagram in (
        (reply.point, reply.reliability, template.point, template.reliability),
        (reply.marginal, reply.marginal_reliability, template.marginal, template.marginal_reliability),
    ):
        if (scores is None) != (wanted is None) or set(scores or ()) != set(wanted or ()):
            raise RecordError("its scores are not those of the task")
        for name, value in (scores or {}).items():
            low, high = bounds(name)
            if not (math.isnan(value) or low - ROUNDING <= value <= high + ROUNDING):
                raise RecordError(f"its {name} is {value:g}, which is not between {low:g} and {high:g}")
        if (bins is None) != (diagram is None) or not (bins is None or _fits(bins, diagram, reply.examples)):
            raise RecordError("its reliability diagram does not fit its examples")
    if not 0 < reply.examples <= held_out:
        raise RecordError(f"it scored {reply.examples} examples, but holds {held_out} out")
    return reply


def check_counts(reply: EvaluateReply, records: Mapping[str, bytes], template: Evaluation) -> Counts:
    """The counts of a site's scores, if they are of its examples and agree with its AUROC; else a RecordError. A site
    may keep its counts."""
    given: Counts = {}
    wanted = (
        ("counts", template.counts, reply.point),
        ("marginal_counts", template.marginal_counts, reply.marginal or {}),
    )
    for name, like, scores in wanted:
        if name not in records:
            continue
        if like is None:
            raise RecordError(f"its {name} are not those of the task")
        counts: ScoreCounts = unpack(records[name], like=like)
        if bool((counts.counts < 0).any()) or bool((counts.counts > reply.examples).any()):
            raise RecordError(f"its {name} are not those of {reply.examples} examples")
        (area, error), own = counts.auroc(), scores["auroc"]
        same = math.isnan(own) if math.isnan(area) else abs(own - area) <= error + ROUNDING
        if counts.examples != reply.examples or not same:
            raise RecordError(f"its {name} do not fit its examples and its auroc")
        given[name] = counts
    return given


def _fits(bins: Bins, diagram: dict[str, Any] | None, examples: int) -> bool:
    edges = [] if diagram is None else diagram["edges"]
    right = len(bins.confidence) == len(bins.accuracy) == len(bins.count) == len(edges) - 1
    return right and bins.edges == edges and sum(bins.count) == examples


def pool_scores(
    replies: dict[str, EvaluateReply],
    belief: str,
    most: int = 10**12,
    counts: Mapping[str, Counts] = MappingProxyType({}),
) -> Evaluation | None:
    """The scores of many sites as one evaluation of a belief of this type: means weighted by the numbers of held-out
    examples, at most `most`. The calibration error is that of all predictions together; so are the AUROC, up to the
    "auroc_error" of its bins, and the balanced accuracy, where sites send counts. R² and similar scores are means of
    the sites' own."""
    if not replies:
        return None
    shares = {name: min(1.0, most / site.examples) for name, site in replies.items()}
    replies = {name: _counted(site, most) for name, site in replies.items()}
    sites = list(replies.values())
    marginal = all(site.marginal is not None for site in sites)
    bins = [_pool([site.reliability for site in sites]), _pool([site.marginal_reliability for site in sites])]
    clients = [
        {"name": name, "examples": site.examples, "metrics": {**(site.marginal or {}), **site.point}}
        for name, site in replies.items()
    ]
    whole = [_ranked(name, counts, shares) for name in ("counts", "marginal_counts")]
    return Evaluation(
        _mean([(site.examples, site.point) for site in sites], bins[0]) | whole[0],
        _mean([(site.examples, site.marginal or {}) for site in sites], bins[1]) | whole[1] if marginal else None,
        clients,
        bins[0] if bins[0] is None else asdict(bins[0]),
        bins[1] if bins[1] is None else asdict(bins[1]),
        belief=belief,
    )


def _ranked(name: str, counts: Mapping[str, Counts], shares: Mapping[str, float]) -> dict[str, float]:
    """AUROC, its largest error, and balanced accuracy of all sites' scores together, a site's weighted by its share."""
    found = [own[name].weighted(shares[site]) for site, own in counts.items() if site in shares and name in own]
    if not found or len(found) < len(shares):
        return {}
    total = reduce(add, found)
    area, error = total.auroc()
    return {"auroc": area, "balanced_accuracy": total.balanced_accuracy(), "auroc_error": error}


def _counted(reply: EvaluateReply, most: int) -> EvaluateReply:
    """The scores of at most `most` examples."""
    if reply.examples <= most:
        return reply
    share = most / reply.examples

    def fewer(bins: Bins | None) -> Bins | None:
        return None if bins is None else bins.model_copy(update={"count": [round(n * share) for n in bins.count]})

    diagrams = {"reliability": fewer(reply.reliability), "marginal_reliability": fewer(reply.marginal_reliability)}
    return reply.model_copy(update={"examples": most, **diagrams})


def _pool(bins: list[Bins | None]) -> Reliability | None:
    found = [Reliability(**one.model_dump()) for one in bins if one is not None]
    return reduce(lambda a, b: a + b, found) if len(found) == len(bins) else None


def _mean(scores: list[tuple[int, dict[str, float]]], bins: Reliability | None) -> dict[str, float]:
    """Means over the sites where a score has a value: R² has none on one example."""
    means = {}
    for name in scores[0][1]:
        finite = [(n, values[name]) for n, values in scores if math.isfinite(values[name])]
        means[name] = sum(n * value for n, value in finite) / sum(n for n, _ in finite) if finite else math.nan
    return means | ({"ece": bins.ece} if bins is not None else {})
