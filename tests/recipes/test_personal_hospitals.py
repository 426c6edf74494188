"""A posterior for every hospital: the claims of the recipe at its small size."""

import json

import pytest
import torch

import consilience as cs
from consilience.recipes import personal_members, personal_setting
from consilience.recipes.personal_setting import LOCAL, ONE_PRIOR, POOLED
from support import quick


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def found(tmp_path_factory, one_thread):
    """What the recipe prints, and its folder."""
    out = tmp_path_factory.mktemp("personal") / "out"
    code, said, errors = quick.reproduce("personal-hospitals", out)
    assert code == 0, errors
    return json.loads(said), out


def means(found):
    return {(row["method"], row["metric"]): row["mean"] for row in found[0]["rows"]}


def test_the_recipe_gives_finite_numbers_and_a_report(found):
    quick.assert_finite("personal-hospitals", found[0])
    assert (found[1] / "report.html").exists()


def test_a_hospital_that_joins_with_20_patients_predicts_better_than_alone_and_than_pooled(found):
    at = means(found)
    assert at[ONE_PRIOR, "nll, m = 20"] < at[LOCAL, "nll, m = 20"] - 0.02
    assert at[ONE_PRIOR, "nll, m = 20"] < at[POOLED, "nll, m = 20"]


@pytest.mark.parametrize("method", [POOLED, ONE_PRIOR])
def test_rounds_after_forgetting_come_closer_to_the_run_that_never_had_the_hospital(found, method):
    at = means(found)
    assert at[method, "apart, 5 rounds"] < 0.5 * at[method, "apart, 0 rounds"]
    assert at[method, "apart, 0 rounds"] < 0.5


def test_with_the_common_mean_fixed_partial_pooling_is_every_hospital_alone():
    hospitals, methods = personal_setting.hospitals(), personal_setting.methods(quick=True)
    together = personal_setting.learn(methods[LOCAL], hospitals)
    single = cs.Federation.from_silos({"Hungary": hospitals.client("Hungary")})
    alone = personal_setting.learn(methods[POOLED], single).posterior
    own = together.personal("Hungary")
    torch.testing.assert_close(own.mean, alone.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(own.variance, alone.variance, rtol=1e-6, atol=0)


def test_the_best_shift_of_predictions_has_a_lower_nll_than_shifts_beside_it():
    made = torch.Generator().manual_seed(0)
    logit = torch.randn(50, generator=made, dtype=torch.float64)
    y = (torch.rand(50, generator=made) < 0.8).long()

    def nll(shift):
        probs = torch.stack([(-logit - shift).sigmoid(), (logit + shift).sigmoid()], 1)
        return probs, -probs[torch.arange(50), y].log().mean()

    best = personal_members.best_shift(nll(0)[0], y)
    shift = float((best[:, 1].logit() - logit).mean())
    lowest = nll(shift)[1]
    assert lowest < nll(shift - 0.05)[1]
    assert lowest < nll(shift + 0.05)[1]
