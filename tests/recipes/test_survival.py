"""Survival at hospitals and in districts: the claims of the recipe at its small size."""

import json

import pytest

from support import quick


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the recipe prints, and its folder."""
    out = tmp_path_factory.mktemp("survival") / "out"
    code, said, errors = quick.reproduce("survival", out)
    assert code == 0, errors
    return json.loads(said), out


@pytest.fixture(scope="module")
def means(found):
    return {(row["method"], row["metric"]): row["mean"] for row in found[0]["rows"]}


def test_the_recipe_gives_finite_numbers_and_a_report(found):
    quick.assert_finite("survival", found[0])
    assert (found[1] / "report.html").exists()


def test_the_posterior_of_six_hospitals_is_that_of_nuts_on_their_pooled_data(means):
    assert means["FedEP", "mean error"] < 0.05
    assert means["FedEP", "worst mean error"] < 0.12
    assert means["FedEP", "worst sd error"] < 0.02


def test_districts_predict_better_together_than_alone(means):
    assert means["FedEP", "concordance, leukaemia"] > means["LocalOnly", "concordance, leukaemia"] + 0.01
    assert means["FedEP", "integrated_brier, leukaemia"] < means["LocalOnly", "integrated_brier, leukaemia"] - 0.005
