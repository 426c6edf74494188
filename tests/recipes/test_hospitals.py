"""The demo's first sentence says what its scores say."""

from pathlib import Path

import pytest

from consilience.recipes.base import Options
from consilience.recipes.hospitals import ALONE, OWN, SHARED, Study, methods, risk_factors

HOSPITALS = ("Cleveland", "Hungary", "Switzerland", "Long Beach")


def study(joins: dict[str, list[float]], home: dict[str, list[float]]) -> Study:
    """A study with these scores over splits; at home every hospital alone has 0.4, and the model for all 0.5."""
    made = Study(Options(quick=True, seeds=3, out=Path()))
    for label, values in joins.items():
        made.table.scores[label, "nll, m = 20"] = values
    for hospital in HOSPITALS:
        own = home.get(hospital, [0.3, 0.3, 0.3])
        for label, values in ((ALONE, [0.4] * 3), (SHARED, [0.5] * 3), (OWN, own)):
            made.table.by_hospital[label, hospital, "nll"] = values
    return made


def test_the_sentence_counts_the_splits_and_names_the_hospitals_that_lose() -> None:
    joins = {ALONE: [0.5, 0.5, 0.5], SHARED: [0.45, 0.45, 0.39], OWN: [0.4, 0.4, 0.4]}
    found = study(joins, {"Hungary": [0.45, 0.39, 0.45]})
    assert found.finding == (
        "A hospital that joins with 20 patients of its own predicts better with partial pooling (NLL 0.400) than alone "
        "(0.500) and than with one model for all (0.430), in 2 of 3 splits. At home, together is better than alone in "
        "10 of 12 cases of a hospital and a split; on average it is worse for Hungary (+0.030, in 2 of 3 splits)."
    )


def test_the_sentence_does_not_say_better_where_it_is_worse() -> None:
    joins = {ALONE: [0.5] * 3, SHARED: [0.3] * 3, OWN: [0.4] * 3}
    found = study(joins, {}).finding
    assert "does not predict better with partial pooling (NLL 0.400)" in found
    assert "in 0 of 3 splits" in found
    assert found.endswith("on average it is worse for no hospital.")


def test_every_hospital_has_its_difference_with_an_interval_for_splits_that_share_patients() -> None:
    entries = study({}, {"Cleveland": [0.3, 0.4, 0.5]}).at_home()
    own = {entry["client"]: entry for entry in entries if entry["method"] == OWN}
    assert list(own) == list(HOSPITALS)
    assert (own["Cleveland"]["difference"], own["Cleveland"]["better"]) == (pytest.approx(0), 1)
    half = 4.302653 * 0.1 * (1 / 3 + 1 / 3) ** 0.5  # Student's t of two degrees of freedom
    assert own["Cleveland"]["high"] == pytest.approx(half, rel=1e-6)


def test_the_risk_factors_need_no_other_category_to_be_understood() -> None:
    shared = {label: method for label, method in methods().items() if label == SHARED}
    everyone, *own = risk_factors(shared[SHARED])
    assert set(everyone.names) == {"sex", "exang", "ca", "oldpeak", "chol", "fbs", "thalach", "trestbps", "age"}
    assert everyone.sign.diff().max() <= 0
    assert [one.of for one in own] == list(HOSPITALS)
