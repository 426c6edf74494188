"""Coefficients of linear models with credible intervals, and survival curves of a run."""

import math
import re

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm
from torch import nn

import consilience as cs
from consilience.core.errors import DataError, TaskError
from consilience.inference import Newton
from consilience.recipes.survival_setting import federation
from consilience.runs import Run
from consilience.runs.coefficients import from_json, to_json

ENGINE = cs.Simulator(precision="float64", workers=1, threads=1)
FEATURES = ("age", "dose")


def table(outputs: int = 1, kind: str = "binary") -> cs.Federation:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(300, 2, generator=made, dtype=torch.float64)
    score = x @ torch.tensor([1.0, -0.5], dtype=torch.float64) + torch.randn(300, generator=made)
    y = (score > 0).long() + (score > 1).long() * (outputs == 3)
    classes = ("well", "ill", "dead")[: max(outputs, 2)] if kind != "regression" else ()
    y = score.unsqueeze(1) if kind == "regression" else y
    data = cs.Dataset(x, y, features=FEATURES, classes=classes)
    return cs.Federation.from_owner(data, torch.arange(300) % 3, names=("a", "b", "c"))


def fitted(task: cs.Task, sites: cs.Federation, method=None, **options) -> Run:
    method = method or cs.FedEP(Newton(), damping=1.0, prior=1.0)
    return cs.fit(method, task, sites, rounds=4, engine=ENGINE, progress=False, **options)


@pytest.fixture(scope="module")
def pooled_partially() -> Run:
    sites = table()
    method = cs.PartialPooling(Newton(), damping=1.0, prior=1.0, tau=0.3)
    return fitted(cs.Binary(nn.Linear(2, 1)), sites, method, test=sites)


def test_intervals_are_those_of_the_posterior() -> None:
    run = fitted(cs.Binary(nn.Linear(2, 1)), table())
    found, sd = run.coefficients(level=0.9), run.posterior.variance.sqrt()[:2]
    assert (found.names, found.title) == (FEATURES, "odds ratio")
    torch.testing.assert_close(found.estimate, run.posterior.mean[:2].exp())
    torch.testing.assert_close(found.lower, (run.posterior.mean[:2] - norm.ppf(0.95) * sd).exp())
    torch.testing.assert_close(found.upper, (run.posterior.mean[:2] + norm.ppf(0.95) * sd).exp())
    assert found.sign[1].item() == pytest.approx(norm.cdf(abs(run.posterior.mean[1]) / sd[1]))
    plain = run.coefficients(exp=False)
    torch.testing.assert_close(plain.estimate, run.posterior.mean[:2])


def test_two_classes_have_the_odds_ratio_of_the_second() -> None:
    run = fitted(cs.Classification(nn.Linear(2, 2)), table())
    found, q = run.coefficients(exp=False), run.posterior
    assert found.names == FEATURES
    torch.testing.assert_close(found.mean, q.mean[2:4] - q.mean[:2])
    contrast = torch.zeros(6, dtype=torch.float64)
    contrast[2], contrast[0] = 1, -1
    assert found.sd[0].item() == pytest.approx(float((contrast @ torch.linalg.inv(q.lam) @ contrast).sqrt()))


def test_of_several_classes_each_has_odds_against_the_first() -> None:
    run = fitted(cs.Classification(nn.Sequential(nn.Flatten(), nn.Linear(2, 3))), table(3))
    assert run.coefficients().names == ("ill: age", "ill: dose", "dead: age", "dead: dose")


def test_a_diagonal_posterior_has_a_table_too() -> None:
    run = fitted(cs.Binary(nn.Linear(2, 1)), table(), cs.FedEP(Newton(diagonal=True), damping=1.0, prior=1.0))
    torch.testing.assert_close(run.coefficients(exp=False).sd, run.posterior.variance.sqrt()[:2])


@pytest.fixture(scope="module")
def of_tables() -> Run:
    draw = np.random.default_rng(0)
    n = 300
    frame = pd.DataFrame(
        {"age": draw.normal(60, 9, n), "sex": draw.choice(["f", "m"], n), "old": draw.integers(0, 2, n)}
    )
    score = (frame["age"] - 60) / 9 + 0.7 * (frame["sex"] == "m") + draw.logistic(size=n)
    frame["ill"] = (score > 0).astype(int)
    frame.loc[:20, "sex"] = None
    sites = cs.Federation.from_tables({"a": frame[:150], "b": frame[150:]}, target="ill")
    return fitted(cs.Binary(nn.Linear(len(sites.data.features), 1)), sites, test=sites)


def test_coefficients_of_tables_are_those_of_columns(of_tables: Run) -> None:
    names, sd = of_tables.federation.data.features, of_tables.federation.data.preparation.columns[0].sd
    assert names == ("age", "sex=f", "sex=m", "sex missing", "old")
    found, q = of_tables.coefficients(exp=False), of_tables.posterior
    assert found.labels == [f"age (per {sd:.3g})", "sex=m vs f", "sex missing vs f", "old (per 1)"]
    torch.testing.assert_close(found.mean[:2], torch.stack([q.mean[0], q.mean[2] - q.mean[1]]))
    contrast = torch.tensor([0, -1, 1, 0, 0, 0], dtype=torch.float64)
    assert found.sd[1].item() == pytest.approx(float((contrast @ torch.linalg.inv(q.lam) @ contrast).sqrt()))
    own = of_tables.federation.data.x[:, 4].double()
    torch.testing.assert_close(found.mean[3], q.mean[4] * (own.max() - own.min()))


def test_a_contrast_of_categories_does_not_have_the_prior_uncertainty_of_both(of_tables: Run) -> None:
    found, single = of_tables.coefficients(exp=False), of_tables.posterior.variance.sqrt()
    assert found.sd[1] < 0.6 * single[1:3].min()


def test_a_number_has_the_coefficient_of_the_difference_that_is_asked_for(of_tables: Run, tmp_path) -> None:
    one, ten = (of_tables.coefficients(exp=False, per={"age": size}) for size in (1, 10))
    assert ten.labels[0] == "age (per 10)"
    torch.testing.assert_close(ten.mean[0], 10 * one.mean[0])
    torch.testing.assert_close(ten.sd[0], 10 * one.sd[0])
    torch.testing.assert_close(ten.mean[1:], one.mean[1:])
    again = from_json(to_json([of_tables.coefficients()]))["all clients"]
    torch.testing.assert_close(again.rescaled({"age": 10}).upper, of_tables.coefficients(per={"age": 10}).upper)
    assert again.labels == of_tables.coefficients().labels


@pytest.mark.parametrize(
    ("per", "message"),
    [
        ({"ages": 1}, "no column of numbers 'ages'; did you mean 'age'?"),
        ({"sex": 1}, "no column of numbers 'sex'"),
        ({"age": 0}, "the difference in 'age' is a positive number, got 0"),
    ],
)
def test_differences_that_cannot_be_are_refused(of_tables: Run, per, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        of_tables.coefficients(per=per)
    with pytest.raises(DataError, match="the inputs are not prepared from tables"):
        fitted(cs.Binary(nn.Linear(2, 1)), table()).coefficients(per={"age": 1})


def test_effects_of_a_regression_are_not_exponentiated() -> None:
    run = fitted(cs.Regression(nn.Linear(2, 1)), table(kind="regression"))
    assert run.coefficients().title == "coefficient"
    assert not run.coefficients().exp


def test_a_client_has_its_own_table_and_a_new_one_wider_intervals(pooled_partially: Run) -> None:
    everyone, new = pooled_partially.coefficients(), pooled_partially.coefficients(newcomer=True)
    own = pooled_partially.coefficients("b", exp=False)
    torch.testing.assert_close(own.mean, pooled_partially.personal("b").mean[:2])
    assert bool((new.sd > everyone.sd).all())
    torch.testing.assert_close(new.mean, everyone.mean)
    assert (everyone.of, own.of, new.of) == ("all clients", "b", "a new client")


def test_the_table_prints_and_becomes_a_frame(pooled_partially: Run) -> None:
    found = pooled_partially.coefficients()
    lines = repr(found).splitlines()
    assert lines[0] == "Coefficients of all clients"
    assert lines[1].split() == ["odds", "ratio", "95", "%", "interval", "P(sign)"]
    assert lines[2].startswith("age")
    frame = found.frame()
    assert list(frame.columns) == ["name", "mean", "sd", "odds_ratio", "lower", "upper", "probability_of_sign"]
    assert frame.odds_ratio[0] == pytest.approx(math.exp(frame["mean"][0]))
    assert "<th>odds ratio</th>" in found._repr_html_()


def test_a_stored_run_has_the_same_tables(tmp_path) -> None:
    sites = table()
    method = cs.PartialPooling(Newton(), damping=1.0, prior=1.0, tau=0.3)
    run = fitted(cs.Binary(nn.Linear(2, 1)), sites, method, test=sites, out=tmp_path / "run")
    stored = cs.load_run(tmp_path / "run")
    for how in ({}, {"client": "c"}, {"newcomer": True}, {"level": 0.5, "exp": False}):
        assert repr(stored.coefficients(**how)) == repr(run.coefficients(**how))
    with pytest.raises(DataError, match="no coefficients of nobody; it has those of all clients"):
        stored.coefficients("nobody")


@pytest.mark.parametrize(
    ("task", "method", "sentence"),
    [
        (cs.Binary(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))), cs.FedEP(), "Sequential is not one"),
        (cs.Binary(nn.Sequential(nn.Linear(2, 1), nn.Tanh())), cs.FedEP(), "Sequential is not one"),
        (cs.Ordinal(nn.Linear(2, 1)), None, "no meaning of their own"),
        (cs.Binary(nn.Linear(2, 1)), cs.FedAvg(), "without a posterior"),
    ],
)
def test_what_has_no_coefficients_says_so(task: cs.Task, method, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        fitted(task, table(), method).coefficients()


@pytest.mark.slow
def test_features_without_names_have_numbers() -> None:
    sites = table()
    plain = cs.Federation.from_owner(cs.Dataset(sites.data.x, sites.data.y), torch.arange(300) % 3)
    assert fitted(cs.Binary(nn.Linear(2, 1)), plain).coefficients().names == ("x0", "x1")


# Survival curves


@pytest.fixture(scope="module")
def cox() -> Run:
    sites = federation("breast")
    return fitted(cs.Cox(nn.Linear(4, 1, bias=False)), sites)


def test_without_uncertainty_a_curve_is_breslows(cox: Run) -> None:
    x = cox.federation.client("II").x[:2]
    times, hazard = cox.baseline_hazard("II")
    curves = cox.survival(x, client="II", samples=0)
    eta = x @ cox.posterior.mean
    torch.testing.assert_close(curves.times, times)
    torch.testing.assert_close(curves.mean, (-hazard * eta.exp().unsqueeze(1)).exp())
    assert cox.survival(x, client="II", samples=0, times=[0.0, 1e6]).mean[:, 0].tolist() == [1, 1]


def test_sums_of_sites_give_the_baseline_of_the_pooled_patients(cox: Run) -> None:
    data, (times, hazard) = cox.federation.data, cox.baseline_hazard()
    eta = data.x @ cox.posterior.mean
    for k in (0, 50, len(times) - 1):
        steps = [
            ((data.y[:, 0] == t) & (data.y[:, 1] == 1)).sum() / eta[data.y[:, 0] >= t].exp().sum()
            for t in times[: k + 1]
        ]
        assert hazard[k].item() == pytest.approx(float(sum(steps)))


def test_bands_have_the_uncertainty_of_the_baseline_too(cox: Run) -> None:
    """Of Nelson and Aalen's estimator at x = 0: the variance of H is Σ d / S², and there are no coefficients."""
    sites = federation("breast")
    run = fitted(cs.Cox(nn.Linear(4, 1, bias=False)), sites, cs.FedEP(Newton(), damping=1.0, prior=1e12))
    curves = run.survival(torch.zeros(1, 4), client="II", samples=4000, times=[1000.0])
    own = sites.client("II").y
    dead = own[(own[:, 1] == 1) & (own[:, 0] <= 1000), 0]
    at_risk = torch.stack([(own[:, 0] >= t).sum() for t in dead]).double()
    hazard, sd = (1 / at_risk).sum(), (1 / at_risk.square()).sum().sqrt()
    assert -curves.upper[0, 0].log().item() == pytest.approx(float(hazard - 1.96 * sd), abs=0.25 * float(sd))
    assert -curves.lower[0, 0].log().item() == pytest.approx(float(hazard + 1.96 * sd), abs=0.25 * float(sd))


def test_curves_become_a_frame(cox: Run) -> None:
    frame = cox.survival(cox.federation.data.x[:2], times=[100.0, 1000.0]).frame()
    assert frame.example.tolist() == [0, 0, 1, 1]
    assert bool((frame.lower <= frame.upper).all())


def test_curves_need_a_task_of_survival(pooled_partially: Run) -> None:
    with pytest.raises(TaskError, match="Cox or DiscreteHazards"):
        pooled_partially.survival(torch.zeros(1, 2))
    with pytest.raises(TaskError, match="belongs to the task Cox"):
        pooled_partially.baseline_hazard()
