"""FedNP's toy regression: the problem, how settings are chosen, and the table at its small size."""

import html
from dataclasses import replace

import numpy as np
import pytest
import torch

from consilience.data import Dataset
from consilience.recipes import fednp_toy as toy
from consilience.recipes import parabola
from consilience.recipes.base import Options
from consilience.report import write_report


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("toy")


@pytest.fixture(scope="module")
def result(folder):
    return toy.run(Options(quick=True, seeds=2, out=folder))


@pytest.fixture(scope="module")
def found(result):
    """The mean of each row, by (method, metric)."""
    return {(row.method, row.metric): row.mean for row in result.rows}


def test_each_client_has_its_piece_of_the_parabola_with_noise_of_deviation_five():
    federation = parabola.federation(0)
    assert federation.sizes.tolist() == [30, 20, 50]
    for client, (low, high) in enumerate([(-7, -5), (-2, 2), (4, 8)]):
        x = federation.client(client).x
        assert low <= x.min() <= x.max() <= high
    data = [parabola.federation(seed).data for seed in range(30)]
    x, y = (torch.cat([getattr(part, name) for part in data]).double() for name in ("x", "y"))
    noise = y - (-(x**2) + 2 * x + 5)
    assert abs(noise.mean()) < 3 * 5 / len(noise) ** 0.5
    assert noise.std() == pytest.approx(5, rel=0.03)
    assert not torch.equal(data[1].x, data[2].x)


def test_the_pooled_fit_is_least_squares():
    data = parabola.federation(3).data
    x, y = data.x.numpy().astype(float)[:, 0], data.y.numpy().astype(float)[:, 0]
    wanted, residuals, _, _ = np.linalg.lstsq(np.vander(x, 4, increasing=True), y, rcond=None)
    w = parabola.least_squares(data)
    np.testing.assert_allclose(w, wanted, rtol=1e-8, atol=1e-8)
    assert parabola.mse(w, data) == pytest.approx(residuals[0] / 100)


def test_the_module_is_the_cubic_that_errors_are_computed_for():
    module, x = parabola.Cubic(), torch.linspace(-7, 8, 9).unsqueeze(1)
    data = Dataset(x, module(x).detach())
    assert parabola.mse(module.linear.weight.detach()[0], data) < 1e-6


def test_settings_are_chosen_on_federations_that_are_in_no_table():
    tables, first, last = (set(seeds) for seeds in (range(toy.OTHERS), toy.FULL.first, toy.FULL.last))
    judges = {toy.UNSEEN + seed for seed in first | last}
    groups = [tables, first, last, judges]
    assert sum(map(len, groups)) == len(set().union(*groups))


def test_all_methods_have_the_same_trials_of_step_sizes():
    drawn = {label: toy.draws(label, method, 8) for label, method in parabola.methods().items()}
    for label, trials in drawn.items():
        assert len(trials) == 8
        assert trials[0] == {}
        for mine, others in zip(trials[1:], drawn["FedAvg"][1:], strict=True):
            assert mine["train.lr"] == others["train.lr"]
            assert ("server.lr" in mine) == (label != "Pooled")
            assert (len(mine) == 3) == (label in toy.STRENGTH)


def test_strengths_cover_the_range_for_methods_that_have_one():
    assert [*toy.grid("FedProx", 11)[0].values()] == [pytest.approx(0.01)]
    assert [*toy.grid("FedNP", 11)[-1].values()] == [pytest.approx(1000)]
    assert toy.grid("SCAFFOLD", 11) == [{}]


def test_the_last_federations_decide_among_the_best_on_the_first(monkeypatch):
    scores = {0.1: (1.0, 9.0), 0.2: (2.0, 5.0), 0.3: (3.0, 6.0), 0.4: (4.0, 0.0)}
    effort = replace(toy.FULL, left=3)
    monkeypatch.setattr(toy, "score", lambda method, seeds: scores[method.mu][seeds is effort.last])
    chosen, entry = toy.best("FedProx", parabola.methods()["FedProx"], [{"mu": mu} for mu in scores], effort)
    assert chosen.mu == 0.2
    assert (entry["chosen"], entry["score"], entry["trials"]) == ({"mu": 0.2}, 5.0, 4)
    assert [trial["score"] for trial in entry["all"]] == [1.0, 2.0, 3.0, 4.0]


def test_without_strength_fednp_is_fedavg():
    found = parabola.learn(parabola.fednp(strength=0.0), 0).path
    torch.testing.assert_close(found, parabola.learn(parabola.methods()["FedAvg"], 0).path)


def test_the_right_strength_is_better_than_none():
    methods, seeds = parabola.methods(), range(toy.OTHERS, toy.OTHERS + 3)
    plain = toy.score(methods["FedAvg"], seeds)
    assert toy.score(parabola.fednp(strength=10.0), seeds) < 0.85 * plain
    assert toy.score(replace(methods["FedProx"], mu=10.0), seeds) < 0.85 * plain


def test_local_curves_are_those_whose_average_comes_next(monkeypatch):
    method = parabola.fednp(strength=10.0)
    run = parabola.learn(method, 5).run
    local = parabola.local(run, 5)
    assert list(local) == ["client 1", "client 2", "client 3"]
    average = sum(share * w for share, w in zip((0.3, 0.2, 0.5), local.values(), strict=True))
    monkeypatch.setattr(parabola, "ROUNDS", parabola.ROUNDS + 1)
    torch.testing.assert_close(parabola.learn(method, 5).path[-1], average, rtol=1e-4, atol=1e-5)


def test_each_method_has_its_rows(result, found):
    methods = list(parabola.methods())
    wanted = {(method, metric) for method in methods for metric in ("mse", "mse, tuned", "x² coefficient")}
    wanted |= {(toy.FIT, "mse"), (toy.FIT, "x² coefficient")}
    wanted |= {(method, "mse of μ") for method in ("FedNP", "FedNP, f = 0")}
    wanted |= {(method, "mse, λ = 10") for method in parabola.variants(10.0)}
    assert set(found) == wanted
    assert {row.method: row.paper for row in result.rows if row.paper is not None} == toy.PAPER


def test_no_method_beats_the_fit_and_pooled_data_come_near_it(found):
    fit = found[toy.FIT, "mse"]
    assert all(value > fit for (method, metric), value in found.items() if "mse" in metric and method != toy.FIT)
    assert found["Pooled", "mse"] < 2.5 * fit
    assert found["FedAvg", "mse"] > 5 * found["Pooled", "mse"]


def test_trials_and_paired_differences_are_stored(result):
    tried = {entry["method"]: entry for entry in result.tuning}
    assert set(tried) == {f"{method}, tuned" for method in parabola.methods()} | set(toy.STRENGTH)
    assert all(len(entry["all"]) == entry["trials"] == 2 for entry in tried.values())
    pairs = {(method, metric) for method in parabola.methods() for metric in ("mse", "mse, tuned")}
    pairs |= {(method, "mse, λ = 10") for method in parabola.variants(10.0)}
    wanted = {(method, metric) for method, metric in pairs if method != "FedNP"}
    assert {(entry["versus"], entry["metric"]) for entry in result.paired} == wanted


def test_the_band_is_three_deviations_of_the_cubics(result):
    panel = result.figures[0].panels[2]
    curves = {curve.label: np.array(curve.y) for curve in panel.curves}
    x = np.array(panel.curves[0].x)
    above, below = (np.abs(curves[label] - curves["FedNP"]) / 3 for label in ("+3 sd", "−3 sd"))
    np.testing.assert_allclose(above, below)
    v, residuals, _, _ = np.linalg.lstsq(np.vander(x**2, 4, increasing=True), above**2, rcond=None)
    assert residuals[0] < 1e-6 * (above**4).sum()  # Φ(x) v Φ(x)ᵀ = Σ v_i x^2i, with one v for all x
    assert (v > 0).all()


def test_the_report_shows_methods_and_figures(result, folder):
    pieces, course = result.figures
    for panel, method in zip(pieces.panels, ("FedAvg", "FedNP"), strict=False):
        assert {curve.label for curve in panel.curves} == {toy.FIT, method, "client 1", "client 2", "client 3"}
    assert {curve.label for curve in course.panels[0].curves} == set(parabola.methods())
    assert {curve.label for curve in course.panels[1].curves} == set(toy.STRENGTH)
    page = write_report(folder).read_text()
    assert all(html.escape(method) in page for method in parabola.methods())
    assert page.count("<figure") >= len(result.figures)
