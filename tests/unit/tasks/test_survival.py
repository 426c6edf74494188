"""Survival: Cox's model over sites against lifelines, and discrete hazards against person-period tables."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import DataError, TaskError
from consilience.inference import Laplace, Newton
from consilience.metrics import concordance
from consilience.recipes.survival_setting import STUDIES, federation
from consilience.runs import Run
from consilience.tasks.likelihoods import Hazards, PartialLikelihood

REFERENCE = json.loads((Path(__file__).parents[2] / "support" / "lifelines.json").read_text())
EXACT = cs.Simulator(precision="float64", workers=1, threads=1)


def zeros(features: int) -> nn.Linear:
    layer = nn.Linear(features, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def stratified(sites: cs.Federation, task: cs.Task, *, prior: float = 1e-7, rounds: int = 12) -> Run:
    method = cs.FedEP(Newton(), damping=1.0, prior=prior)
    return cs.fit(method, task, sites, rounds=rounds, engine=EXACT, progress=False)


@pytest.fixture(scope="module", params=sorted(STUDIES))
def fitted(request) -> tuple[Run, dict]:
    sites = federation(request.param)
    return stratified(sites, cs.Cox(zeros(sites.data.x.shape[1]))), REFERENCE[request.param]


@pytest.mark.slow
def test_sites_together_find_the_coefficients_and_errors_of_the_pooled_stratified_fit(fitted) -> None:
    run, reference = fitted
    found = run.coefficients(exp=False)
    assert found.mean.tolist() == pytest.approx(reference["coefficients"], abs=1e-6)
    assert found.sd.tolist() == pytest.approx(reference["standard_errors"], abs=1e-6)


def test_the_baseline_hazard_of_a_site_is_that_of_its_stratum(fitted) -> None:
    run, reference = fitted
    times, hazard = run.baseline_hazard(reference["site"])
    assert times.tolist() == reference["times"]
    assert hazard.tolist() == pytest.approx(reference["cumulative_hazard"], rel=1e-5)


def test_the_concordance_is_that_of_lifelines(fitted) -> None:
    run, reference = fitted
    data = run.federation.data
    risk = data.x @ torch.tensor(reference["coefficients"], dtype=torch.float64)
    assert concordance(risk, data.y) == pytest.approx(reference["concordance"], abs=1e-9)


def efron(eta: np.ndarray, time: np.ndarray, event: np.ndarray) -> float:
    """Efron's partial likelihood by its definition."""
    total = 0.0
    for t in np.unique(time[event > 0]):
        tied = np.flatnonzero((time == t) & (event > 0))
        at_risk, own = np.exp(eta[time >= t]).sum(), np.exp(eta[tied]).sum()
        total += sum(math.log(at_risk - r / len(tied) * own) for r in range(len(tied))) - eta[tied].sum()
    return total / len(time)


def ties(n: int = 60, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    eta = torch.randn(n, generator=made, dtype=torch.float64)
    time = (5 * torch.rand(n, generator=made, dtype=torch.float64)).ceil()
    return eta, torch.stack([time, (torch.rand(n, generator=made) < 0.7).double()], 1)


@pytest.mark.parametrize("seed", [0, 1])
def test_efrons_rule_is_its_definition(seed: int) -> None:
    eta, y = ties(seed=seed)
    wanted = efron(eta.numpy(), *y.T.numpy())
    assert PartialLikelihood().losses(eta, y).item() == pytest.approx(wanted, rel=1e-12)
    assert PartialLikelihood().losses(eta.float(), y.float()).item() == pytest.approx(wanted, rel=1e-5)


def test_without_ties_both_rules_are_one() -> None:
    eta, y = ties()
    y[:, 0] += torch.linspace(0, 0.5, len(y), dtype=torch.float64)
    both = [PartialLikelihood(rule).losses(eta, y).item() for rule in ("efron", "breslow")]
    assert both[0] == pytest.approx(both[1], rel=1e-12)


def test_log_hazards_far_apart_do_not_underflow_in_float32() -> None:
    eta, y = ties()
    far = (100 * eta).float()
    assert PartialLikelihood().losses(far, y.float()).item() == pytest.approx(
        PartialLikelihood().losses(far.double(), y).item(), rel=1e-5
    )


def test_a_rule_of_ties_that_is_none_is_refused() -> None:
    with pytest.raises(TaskError, match="ties is 'efron' or 'breslow', got 'exact'"):
        cs.Cox(zeros(2), ties="exact")


@pytest.mark.slow
def test_a_site_without_events_adds_nothing() -> None:
    sites = federation("breast")
    some = {name: sites.client(name) for name in ("I", "II", "III")}
    none = some["I"][:30]
    censored = cs.Dataset(none.x, none.y * torch.tensor([1.0, 0.0]), features=none.features)
    without = stratified(cs.Federation.from_silos(some), cs.Cox(zeros(4)))
    run = stratified(cs.Federation.from_silos({**some, "new": censored}), cs.Cox(zeros(4)))
    torch.testing.assert_close(run.posterior.mean, without.posterior.mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(run.posterior.variance, without.posterior.variance, rtol=1e-10, atol=0)
    assert not any(line["rejected"] for line in run.history)
    with pytest.raises(DataError, match="ask for that of all clients"):
        run.baseline_hazard("new")


def test_newton_takes_the_whole_risk_set_whatever_its_batch_size() -> None:
    sites = federation("breast")
    runs = [
        cs.fit(cs.FedEP(Newton(batch_size=size), damping=1.0, prior=1.0), cs.Cox(zeros(4)), sites, rounds=2,
               engine=EXACT, progress=False)
        for size in (7, 1024)
    ]  # fmt: skip
    assert torch.equal(runs[0].posterior.mean, runs[1].posterior.mean)


def test_laplace_names_a_way_out_as_a_partial_likelihood_cannot_be_drawn_from() -> None:
    with pytest.raises(cs.ConsilienceError, match="use Newton"):
        cs.fit(cs.FedEP(Laplace()), cs.Cox(zeros(4)), federation("breast"), rounds=1, progress=False)


@pytest.mark.slow
def test_a_newton_step_that_overshoots_is_halved() -> None:
    """Of few patients, a full step from 0 leads to log hazards where the likelihood is flat."""
    sites = federation("leukaemia")
    pooling = cs.PartialPooling(Newton(), damping=1.0, prior=1e10, tau=30.0, parts="all", learn=False)
    run = cs.fit(pooling, cs.Cox(zeros(4)), sites, rounds=2, engine=EXACT, progress=False)
    for client in ("9", "21", "2"):
        own = run.personal(client)
        data = sites.client(client)

        def energy(theta: torch.Tensor, data=data) -> torch.Tensor:
            return len(data) * PartialLikelihood().losses(data.x @ theta, data.y) + theta.square().sum() / 1800

        assert torch.func.grad(energy)(own.mean).abs().max() < 1e-6


# Discrete-time hazards

TIMES = torch.linspace(300, 2100, 7).tolist()


def person_period(data: cs.Dataset, times: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """A row for each example and interval in which it was at risk: features and indicators of the interval, and the
    event."""
    rows, events = [], []
    for x, (time, event) in zip(data.x.tolist(), data.y.tolist(), strict=True):
        for k, end in enumerate(times):
            ends_here = event == 1 and time <= end
            if not ends_here and time < end:
                break
            rows.append(x + [float(j == k) for j in range(len(times))])
            events.append(float(ends_here))
            if ends_here:
                break
    return np.array(rows), np.array(events)


def hazards(link: str) -> tuple[Run, np.ndarray, np.ndarray]:
    sites = federation("breast")
    task = cs.DiscreteHazards(cs.models.ProportionalHazards(4, len(TIMES)), times=TIMES, link=link)
    run = stratified(sites, task, prior=1e-9, rounds=15)
    return run, *person_period(sites.data, TIMES)


@pytest.fixture(scope="module", params=["logit", "cloglog"])
def intervals(request):
    return request.param, *hazards(request.param)


@pytest.mark.slow
def test_sites_with_one_baseline_find_the_binary_regression_on_the_pooled_person_period_table(intervals) -> None:
    """At its maximum the score of a binary regression is 0, and the posterior's precision is its information."""
    link, run, rows, events = intervals
    table = torch.tensor(rows)

    def energy(theta: torch.Tensor) -> torch.Tensor:
        eta = table @ torch.cat([theta[parts["linear.weight"]], theta[parts["baseline"]]])
        h = eta.sigmoid() if link == "logit" else 1 - (-eta.exp()).exp()
        y = torch.tensor(events)
        return -(y * h.log() + (1 - y) * (1 - h).log()).sum()

    parts = {name: run.task.slice(parameter=name) for name in ("linear.weight", "baseline")}
    mean, information = run.posterior.mean, torch.func.jacrev(torch.func.grad(energy))(run.posterior.mean)
    step = torch.linalg.solve(information, torch.func.grad(energy)(mean))
    assert step.abs().max() < 1e-7
    torch.testing.assert_close(run.posterior.lam, information, rtol=1e-6, atol=1e-6)


def test_sklearn_finds_the_same_coefficients_on_the_person_period_table(intervals) -> None:
    from sklearn.linear_model import LogisticRegression

    link, run, rows, events = intervals
    assert run.coefficients().title == ("odds ratio" if link == "logit" else "hazard ratio")
    if link == "cloglog":
        return
    model = LogisticRegression(C=1e9, fit_intercept=False, tol=1e-12, max_iter=10_000).fit(rows, events)
    assert run.coefficients(exp=False).mean.tolist() == pytest.approx(model.coef_[0][:4].tolist(), abs=1e-5)


def test_the_curve_without_features_is_that_of_the_life_table() -> None:
    sites = federation("breast")
    y = sites.data.y
    times = torch.tensor(TIMES, dtype=torch.float64)
    survived, event = Hazards(times)._periods(y)
    hazard = event.double().sum(0) / (event | survived).double().sum(0)
    output = hazard.logit().expand(len(y), -1)
    curve = Hazards(times).predictive(output)
    torch.testing.assert_close(curve[0], (1 - hazard).cumprod(0))
    shifted = output + 0.1
    assert Hazards(times).losses(output, y).mean() < Hazards(times).losses(shifted, y).mean()


def test_an_interval_includes_its_end_and_a_censored_example_counts_where_it_was_at_risk_to_the_end() -> None:
    y = torch.tensor([[1.0, 1], [1.0, 0], [1.5, 0], [2.5, 1], [9.0, 1]])
    survived, event = Hazards([1.0, 2.0, 3.0])._periods(y)
    assert survived.tolist() == [
        [False, False, False], [True, False, False], [True, False, False], [True, True, False], [True, True, True],
    ]  # fmt: skip
    assert event.nonzero().tolist() == [[0, 0], [3, 2]]


def test_times_that_float32_rounds_stay_in_their_interval_in_float64() -> None:
    y = torch.tensor([[0.1, 1.0], [0.1, 0.0]])
    survived, event = Hazards([0.1, 0.2]).to(torch.device("cpu"), torch.float64)._periods(y.double())
    assert event.tolist() == [[True, False], [False, False]]
    assert survived.tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize("link", ["logit", "cloglog"])
def test_drawn_times_follow_the_curve(link: str) -> None:
    likelihood = Hazards([1.0, 2.0, 4.0], link)
    output = torch.tensor([-1.0, -0.5, 0.3], dtype=torch.float64).expand(40_000, 3)
    drawn = likelihood.draw(output, torch.tensor(3))
    for k, end in enumerate([1.0, 2.0, 4.0]):
        alive = ((drawn[:, 0] > end) | (drawn[:, 1] == 0)).double().mean()
        assert float(alive) == pytest.approx(float(likelihood.predictive(output)[0, k]), abs=0.01)


@pytest.mark.parametrize("link", ["logit", "cloglog"])
def test_losses_and_gradients_of_extreme_outputs_are_finite(link: str) -> None:
    y = torch.tensor([[0.5, 1.0], [9.0, 0.0], [1.5, 1.0]])

    def loss(output: torch.Tensor) -> torch.Tensor:
        return Hazards([1.0, 2.0], link).losses(output, y).sum()

    for size in (-80.0, -16.0, -14.0, 3.0):
        output = torch.full((3, 2), size)
        assert bool(loss(output).isfinite())
        assert bool(torch.func.grad(loss)(output).isfinite().all())


def test_a_new_site_is_predicted_by_the_common_baseline(intervals) -> None:
    _, run, *_ = intervals
    x = run.federation.data.x[:3]
    curves = run.survival(x)
    assert curves.times.tolist() == pytest.approx(TIMES)
    torch.testing.assert_close(curves.mean, run.predict(x, samples=200), rtol=1e-6, atol=1e-6)
    assert bool((curves.lower <= curves.mean).all() & (curves.mean <= curves.upper).all())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Hazards([]), "ends of intervals"),
        (lambda: Hazards([0.0, 1.0]), "ends of intervals"),
        (lambda: Hazards([2.0, 1.0]), "ends of intervals"),
        (lambda: Hazards([1.0], "probit"), "link is 'logit' or 'cloglog'"),
    ],
)
def test_intervals_that_are_none_are_refused(make, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        make()


def test_a_module_with_too_few_outputs_is_shown_one_that_fits() -> None:
    with pytest.raises(DataError, match=r"cs.models.ProportionalHazards\(features, 2\) is a linear one"):
        cs.DiscreteHazards(zeros(4), times=[1.0, 2.0]).check(federation("breast").data)


@pytest.mark.slow
def test_networks_learn_hazards_by_gradients() -> None:
    sites = federation("breast").to("cpu")
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, len(TIMES)))
    task = cs.DiscreteHazards(net, times=TIMES)
    run = cs.fit(cs.FedAvg(cs.SGD(lr=0.1, epochs=2)), task, sites, rounds=15, test=sites.data, progress=False)
    assert run.evaluation.point["concordance"] > 0.6
    assert run.evaluation.point["integrated_brier"] < 0.22


def test_fisher_information_of_hazards_is_defined() -> None:
    sites = federation("breast")
    task = cs.DiscreteHazards(cs.models.ProportionalHazards(4, len(TIMES)), times=TIMES)
    run = cs.fit(cs.FedEP(Laplace(kappa=1.0)), task, sites, rounds=2, progress=False)
    assert bool(run.posterior.variance.isfinite().all())
