"""FedEP where the exact answer is known: its claims, and the figures that show them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from consilience.recipes import RECIPES, fedep_linear, fedep_toy
from consilience.recipes.base import Options
from consilience.recipes.fedep_linear import MANY, ONE
from consilience.report import write_report


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def draws():
    return fedep_toy.draw(seed=0)


def errors(method, draws, sweeps=1):
    """Of the mean after every sweep in every draw."""
    mean = fedep_toy.path(fedep_toy.methods()[method], *draws, sweeps)
    return (mean - fedep_toy.product(*draws).mean).norm(dim=-1)


@pytest.mark.parametrize(("method", "expected"), [("FedAvg", 0.53), ("FedPA", 0.26)])
def test_fedavg_and_fedpa_have_the_papers_errors(draws, method, expected):
    error = errors(method, draws)
    assert error.shape == (1, 200)
    assert float(error.mean()) == pytest.approx(expected, rel=0.1)


def test_fedep_finds_the_mean_of_the_product_with_variances_alone(draws):
    error = errors("FedEP", draws, sweeps=40)[-1]
    assert float(error.mean()) < 1e-6
    assert float(error.max()) < 1e-5


def test_the_scaled_identity_is_slower_on_its_way_to_the_same_point(draws):
    some = tuple(part[: fedep_toy.TOGETHER] for part in draws)
    slow, fast = (errors(method, some, sweeps).mean(1) for method, sweeps in {"FedEP(I)": 80, "FedEP": 20}.items())
    assert float(fast[19]) < 0.1 * float(slow[19])
    assert float(slow[-1]) < 1e-6


def test_a_client_s_two_examples_have_its_gaussian_as_their_likelihood(draws):
    mean, covariance = (part[:3] for part in draws)
    clients = fedep_toy.federation(mean, covariance)
    for k in range(2):
        data = clients.client(k)
        precision = data.x.mT @ data.x
        torch.testing.assert_close(precision, torch.block_diag(*covariance[:, k].inverse()))
        at = torch.linalg.solve(precision, data.x.mT @ data.y).view(-1, 2)
        torch.testing.assert_close(at, mean[:, k])


def test_the_plain_average_is_that_of_the_clients_means(draws):
    mean, covariance = (part[: fedep_toy.TOGETHER] for part in draws)
    (found,) = fedep_toy.path(fedep_toy.methods()["FedAvg"], mean, covariance, 1)
    torch.testing.assert_close(found, mean.mean(1))


def test_clients_without_a_cavity_send_the_same_factors_again(draws):
    mean, covariance = (part[: fedep_toy.TOGETHER] for part in draws)
    clients, task = fedep_toy.federation(mean, covariance), fedep_linear.linear(2 * fedep_toy.TOGETHER)
    for method in ("FedAvg", "FedPA"):
        first, _, third = fedep_linear.beliefs(fedep_toy.methods()[method], task, clients, 3)
        torch.testing.assert_close(first.mean, third.mean)


def ends(method, sweeps, seed=0):
    """Errors of mean and covariance after every sweep."""
    clients = fedep_linear.regression(seed)
    task = fedep_linear.linear(fedep_linear.FEATURES)
    found = fedep_linear.beliefs(fedep_linear.methods()[method], task, clients, sweeps)
    return fedep_linear.distances(found, fedep_linear.pooled(clients))


@pytest.mark.parametrize("seed", range(2))
def test_fedep_finds_the_pooled_posterior_in_one_sweep(seed):
    mean, covariance = ends(ONE, 1, seed)
    assert float(mean) < 1e-6
    assert float(covariance) < 1e-6


@pytest.mark.parametrize("method", [MANY, "FedSEP, δ = 1/K"])
def test_with_damping_the_error_falls_by_the_same_factor_in_every_sweep(method):
    mean, covariance = ends(method, 100)
    for error in (mean, covariance):
        assert float(error[-1]) < 1e-6
        assert float((error[74] / error[24]) ** (1 / 50)) == pytest.approx(1 - 1 / len(fedep_linear.SIZES), rel=1e-2)


def test_adf_comes_by_the_posterior_and_goes_on():
    mean, covariance = ends("ADF", 10)
    for error in (mean, covariance):
        assert float(error[len(fedep_linear.SIZES) - 1]) < 1e-6
        assert float(error[-1]) > 1e-4


@pytest.fixture(scope="module", params=["fedep-toy", "fedep-linear"])
def reproduced(request, tmp_path_factory):
    out, said = tmp_path_factory.mktemp(request.param), []
    options = Options(quick=True, seeds=2, out=out, announce=lambda method, seed: said.append((method, seed)))
    result = RECIPES[request.param].run(options)
    return request.param, result, json.loads((out / "comparison.json").read_text()), write_report(out).read_text(), said


def test_each_method_has_its_rows_over_all_seeds(reproduced):
    name, result, _, _, said = reproduced
    methods = fedep_toy.methods() if name == "fedep-toy" else fedep_linear.methods()
    assert said == [(method, seed) for method in methods for seed in (0, 1)]
    assert {row.method for row in result.rows} == set(methods)
    assert {row.n for row in result.rows} == {2 * fedep_toy.TOGETHER if name == "fedep-toy" else 2}


def test_the_paper_s_figures_stand_beside_the_toy_s(reproduced):
    name, result, _, page, _ = reproduced
    paper = {row.method: row.paper for row in result.rows if row.paper is not None}
    assert paper == (fedep_toy.PAPER if name == "fedep-toy" else {})
    assert ("over 100 draws" if name == "fedep-toy" else "over 2 seeds") in page


def test_the_figure_is_on_the_page(reproduced):
    _, _, content, page, _ = reproduced
    (figure,) = content["figures"]
    assert len(figure["panels"]) == 2
    assert f"<h2>{figure['title']}</h2>" in page
    assert page.count('<figure class="wide">') == 1


@pytest.mark.parametrize("reproduced", ["fedep-toy"], indirect=True)
def test_fedep_s_path_in_the_figure_ends_at_the_product(reproduced):
    _, result, _, _, _ = reproduced
    plane, by_sweep = result.figures[0].panels
    target = next(ellipse for ellipse in plane.ellipses if ellipse.strong)
    end = next(mark for mark in plane.marks if mark.label == "FedEP")
    assert (end.x, end.y) == pytest.approx(target.mean, abs=1e-4)
    drawn = {curve.label: curve.y[-1] for curve in by_sweep.curves}
    assert drawn == {row.method: pytest.approx(row.mean) for row in result.rows}


def test_recipes_are_known_without_what_only_reports_need():
    code = "import sys, consilience.recipes; sys.exit(bool({'matplotlib', 'jinja2', 'sklearn'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
