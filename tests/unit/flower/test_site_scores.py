"""Scores of sites are pooled as if all predictions were at one place, and impossible ones are rejected."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

from consilience.core import pack
from consilience.core.errors import RecordError
from consilience.evaluation.scores import Evaluation
from consilience.flower.messages import Bins, EvaluateReply, decode
from consilience.flower.scores import check_counts, check_scores, pool_scores
from consilience.metrics import ScoreCounts, named, reliability
from support.flower_grid import json_content


def predictions(examples=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(examples, 3, generator=generator, dtype=torch.float64), 1)
    return probs, torch.randint(3, (examples,), generator=generator)


def reply(probs, y):
    bins = reliability(probs, y)
    accuracy = (probs.argmax(1) == y).double().mean().item()
    return EvaluateReply(
        examples=len(y),
        point={"accuracy": accuracy, "ece": bins.ece},
        marginal=None,
        reliability=Bins(**bins.__dict__),
        marginal_reliability=None,
    )


@pytest.mark.parametrize("cuts", [[], [1], [59], [7, 20, 21, 44]])
def test_the_calibration_error_of_many_sites_is_that_of_all_their_predictions(cuts):
    probs, y = predictions(seed=len(cuts))
    ends = [0, *cuts, 60]
    parts = {f"site {a}": reply(probs[a:b], y[a:b]) for a, b in itertools.pairwise(ends)}
    found, whole = pool_scores(parts, "Point"), reply(probs, y)
    assert found.point["ece"] == pytest.approx(whole.point["ece"], abs=1e-12)
    assert found.point["accuracy"] == pytest.approx(whole.point["accuracy"], abs=1e-12)
    assert [client["examples"] for client in found.clients] == [b - a for a, b in itertools.pairwise(ends)]
    assert found.marginal is None
    assert found.belief == "Point"


def test_without_replies_there_are_no_scores():
    assert pool_scores({}, "Point") is None


POINT = reply(*predictions())
SOUND = POINT.model_copy(update={"marginal": POINT.point, "marginal_reliability": POINT.reliability})


def bins(**changes):
    return {**SOUND.reliability.model_dump(), **changes}


POINT_TEMPLATE = Evaluation(POINT.point, None, [], bins(), None)
TEMPLATE = replace(POINT_TEMPLATE, marginal=POINT.point, marginal_reliability=bins())
REGRESSION = replace(TEMPLATE, reliability=None, marginal_reliability=None)


def checked(template=TEMPLATE, held_out=60, **changes):
    """A site's reply with other values, as the server reads it."""
    values = json.loads(SOUND.model_dump_json()) | changes
    return check_scores(decode(json_content(values), EvaluateReply)[0], template, held_out)


def test_sound_scores_are_accepted_unchanged():
    assert checked() == SOUND
    assert checked(POINT_TEMPLATE, marginal=None, marginal_reliability=None) == POINT
    plain = {"reliability": None, "marginal_reliability": None}
    assert checked(REGRESSION, **plain) == SOUND.model_copy(update=plain)
    extreme = bins(count=[60] + [0] * 14, confidence=[0.0] * 15, accuracy=[1.0] * 15)
    assert checked(reliability=extreme).reliability == Bins(**extreme)


def test_a_site_cannot_score_more_examples_than_it_holds_out():
    few = reply(*predictions(7))
    for held_out in (7, 8, 10**12):
        assert check_scores(few, POINT_TEMPLATE, held_out) == few
    for held_out in (6, 0):
        with pytest.raises(RecordError, match=f"it scored 7 examples, but holds {held_out} out"):
            check_scores(few, POINT_TEMPLATE, held_out)
    boast = bins(count=[0] * 14 + [10**9])
    with pytest.raises(RecordError, match="it scored 1000000000 examples, but holds 60 out"):
        checked(examples=10**9, reliability=boast, marginal_reliability=boast)
    for examples in (-1, 1.5, 10**12 + 1, 10**400):
        with pytest.raises(RecordError, match="EvaluateReply: examples: "):
            checked(examples=examples)


@pytest.mark.parametrize(("value", "accepted"), [(0.0, True), (1.0 + 1e-7, True), (math.nan, True), (1.01, False)])
def test_scores_must_lie_in_their_range(value, accepted):
    if accepted:
        assert str(checked(point=SOUND.point | {"accuracy": value}).point["accuracy"]) == str(value)
        return
    for which in ("point", "marginal"):
        with pytest.raises(RecordError, match=r"its accuracy is 1\.01, which is not between 0 and 1"):
            checked(**{which: SOUND.point | {"accuracy": value}})


def test_a_site_with_very_many_examples_counts_for_at_most_so_many():
    probs, y = predictions()
    one, many, other = reply(probs, y), reply(probs.repeat(20, 1), y.repeat(20)), reply(*predictions(60, 1))
    found, equal = (pool_scores({"a": other, "b": site}, "Point", 60) for site in (many, one))
    assert found.point == pytest.approx(equal.point)
    assert [client["examples"] for client in found.clients] == [60, 60]
    assert sum(found.reliability["count"]) == 120


OTHER = "its scores are not those of the task"
UNFIT = "its reliability diagram does not fit its examples"
ONE_BIN = {"edges": [0.0, 1.0], "confidence": [0.5], "accuracy": [0.25], "count": [60]}
WRONG_SCORES = [{}, {"beauty": 1.0}, SOUND.point | {"beauty": 1.0}, {"accuracy": 1.0}]
WRONG_BINS = {
    "none": (None, UNFIT),
    "no bins": ({}, "EvaluateReply: {}.edges: Field required"),
    "another field": (bins(colour=[1.0]), "EvaluateReply: {}.colour: Extra inputs"),
    "other bins": (ONE_BIN, UNFIT),
    "other edges": (bins(edges=[edge / 2 for edge in SOUND.reliability.edges]), UNFIT),
    "fewer confidences": (bins(confidence=SOUND.reliability.confidence[:-1]), UNFIT),
    "fewer accuracies": (bins(accuracy=SOUND.reliability.accuracy[:-1]), UNFIT),
    "more counts": (bins(count=[*SOUND.reliability.count, 0]), UNFIT),
    "words for numbers": (bins(count=["x"] * 15), "EvaluateReply: {}.count.0: "),
    "a negative count": (bins(count=[-1, 61] + [0] * 13), "EvaluateReply: {}.count.0: "),
    "more than it scored": (bins(count=[61] + [0] * 14), UNFIT),
    "fewer than it scored": (bins(count=[59] + [0] * 14), UNFIT),
    "too large a count": (bins(count=[10**12 + 1] * 15), "EvaluateReply: {}.count.0: "),
    "more than a float holds": (bins(count=[10**400] * 15), "EvaluateReply: {}.count.0: "),
    "not a number": (bins(confidence=[math.nan] * 15), "EvaluateReply: {}.confidence.0: "),
    "infinite": (bins(accuracy=[math.inf] * 15), "EvaluateReply: {}.accuracy.0: "),
    "above one": (bins(accuracy=[7.0] * 15), "EvaluateReply: {}.accuracy.0: "),
    "below zero": (bins(confidence=[-0.1] * 15), "EvaluateReply: {}.confidence.0: "),
}


@pytest.mark.parametrize("which", ["point", "marginal"])
@pytest.mark.parametrize("wrong", WRONG_SCORES, ids=range(4))
def test_other_scores_than_the_tasks_are_rejected(wrong, which):
    with pytest.raises(RecordError, match=OTHER):
        checked(**{which: wrong})


def test_scores_of_a_posterior_are_needed_if_and_only_if_there_is_one():
    for site, template in ((POINT, TEMPLATE), (SOUND, POINT_TEMPLATE)):
        with pytest.raises(RecordError, match=OTHER):
            check_scores(site, template, 60)


@pytest.mark.parametrize("which", ["reliability", "marginal_reliability"])
@pytest.mark.parametrize(("wrong", "message"), WRONG_BINS.values(), ids=WRONG_BINS)
def test_a_wrong_diagram_is_rejected(wrong, message, which):
    with pytest.raises(RecordError, match=message.format(which)):
        checked(**{which: wrong})


def test_a_diagram_is_rejected_where_the_task_has_none():
    for one in ("reliability", "marginal_reliability"):
        with pytest.raises(RecordError, match=UNFIT):
            checked(REGRESSION, **{"reliability": None, "marginal_reliability": None} | {one: bins()})
    with pytest.raises(RecordError, match=UNFIT):
        checked(POINT_TEMPLATE, marginal=None)


def r2(examples, value):
    return EvaluateReply(
        examples=examples, point={"r2": value}, marginal=None, reliability=None, marginal_reliability=None
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_score_without_a_value_at_one_site_is_the_mean_of_the_others(value):
    """R² of one held-out example is NaN."""
    sites = {"a": r2(1, value), "b": r2(9, 0.5), "c": r2(3, 0.1)}
    for order in itertools.permutations(sites):
        found = pool_scores({name: sites[name] for name in order}, "Point")
        assert found.point["r2"] == pytest.approx((9 * 0.5 + 3 * 0.1) / 12)


def test_a_score_without_a_value_anywhere_is_nan():
    assert math.isnan(pool_scores({"a": r2(1, math.nan), "b": r2(1, math.nan)}, "Point").point["r2"])


def test_a_reply_about_no_examples_is_rejected():
    with pytest.raises(RecordError, match="it scored 0 examples"):
        check_scores(r2(0, 0.5), Evaluation({"r2": math.nan}, None, [], None, None), 9)


# Counts of scores of two classes


def two_classes(examples=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (examples,), generator=generator)
    p = (torch.randn(examples, generator=generator, dtype=torch.float64) + y - 0.5).sigmoid()
    return torch.stack([1 - p, p], 1), y


def scored(probs, y):
    """(reply, packed counts) of a site with two classes."""
    scores = {name: float(named(name)(probs, y)) for name in ("auroc", "balanced_accuracy")}
    return reply(probs, y).model_copy(update={"point": scores}), {"counts": pack(ScoreCounts.of(probs, y))}


def evaluation_of(probs, y):
    found, _ = scored(probs, y)
    return Evaluation(found.point, None, [], found.reliability.model_dump(), None, counts=ScoreCounts.of(probs, y))


def test_the_auroc_of_all_sites_is_that_of_all_their_scores_up_to_its_stated_error():
    probs, y = two_classes(300)
    template, parts = evaluation_of(probs, y), torch.arange(300).split([40, 160, 100])
    replies, counts = {}, {}
    for k, rows in enumerate(parts):
        replies[f"site {k}"], records = scored(probs[rows], y[rows])
        counts[f"site {k}"] = check_counts(replies[f"site {k}"], records, template)
    found = pool_scores(replies, "Point", counts=counts).point
    assert abs(found["auroc"] - named("auroc")(probs, y)) <= found["auroc_error"] < 0.01
    assert found["balanced_accuracy"] == pytest.approx(named("balanced_accuracy")(probs, y), abs=1e-12)


def test_a_site_of_one_class_counts_in_the_auroc_of_all():
    probs, y = two_classes(100)
    parts = [y == 0, y == 1]
    replies = {str(k): scored(probs[rows], y[rows])[0] for k, rows in enumerate(parts)}
    assert all(math.isnan(one.point["auroc"]) for one in replies.values())
    counts = {str(k): {"counts": ScoreCounts.of(probs[rows], y[rows])} for k, rows in enumerate(parts)}
    found = pool_scores(replies, "Point", counts=counts).point
    assert abs(found["auroc"] - named("auroc")(probs, y)) <= found["auroc_error"]


def test_a_site_with_very_many_scores_counts_for_at_most_so_many():
    (one, _), (other, _) = scored(*two_classes(60)), scored(*two_classes(600, 1))
    counts = {"a": {"counts": ScoreCounts.of(*two_classes(60))}, "b": {"counts": ScoreCounts.of(*two_classes(600, 1))}}
    found = pool_scores({"a": one, "b": other}, "Point", 60, counts).point
    total = counts["a"]["counts"].weighted(1.0) + counts["b"]["counts"].weighted(0.1)
    assert found["auroc"] == total.auroc()[0]


def test_counts_that_do_not_fit_are_rejected():
    probs, y = two_classes()
    found, records = scored(probs, y)
    template = evaluation_of(probs, y)
    assert torch.equal(check_counts(found, records, template)["counts"].counts, ScoreCounts.of(probs, y).counts)
    assert check_counts(found, {}, template) == {}, "a site may keep its counts"
    with pytest.raises(RecordError, match="its counts are not those of the task"):
        check_counts(found, records, replace(template, counts=None))
    with pytest.raises(RecordError, match="do not fit its examples and its auroc"):
        check_counts(found, {"counts": pack(ScoreCounts.of(probs.flip(1), y))}, template)
    with pytest.raises(RecordError, match="do not fit its examples and its auroc"):
        check_counts(found, {"counts": pack(ScoreCounts.of(probs[:50], y[:50]))}, template)
    negative = ScoreCounts.of(probs, y)
    negative.counts[0, 0] = -1
    with pytest.raises(RecordError, match="its counts are not those of 60 examples"):
        check_counts(found, {"counts": pack(negative)}, template)
    with pytest.raises(RecordError):
        check_counts(found, {"counts": pack(ScoreCounts(torch.zeros(2, 3, dtype=torch.int64)))}, template)
