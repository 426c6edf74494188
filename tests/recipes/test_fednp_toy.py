"""Three pieces of a parabola: the data, how settings are chosen, and the table at its small size."""

import html
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from consilience.data import Dataset
from consilience.recipes import fednp_toy as toy
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
    return toy.run(Options(quick=True, seeds=3, out=folder))


@pytest.fixture(scope="module")
def found(result):
    """The mean of every row, by (method, metric)."""
    return {(row.method, row.metric): row.mean for row in result.rows}


# The data


def test_every_client_has_its_piece_and_nothing_else():
    federation = toy.federation(0)
    assert federation.sizes.tolist() == [30, 20, 50]
    for client, (low, high) in enumerate([(-7, -5), (-2, 2), (4, 8)]):
        x = federation.client(client).x
        assert low <= x.min() <= low + 0.5
        assert high - 0.5 <= x.max() <= high


def test_targets_are_the_parabola_with_noise_of_deviation_five():
    data = [toy.federation(seed).data for seed in range(50)]
    x, y = (torch.cat([getattr(part, name) for part in data]).double() for name in ("x", "y"))
    noise = (y - (-(x**2) + 2 * x + 5))[:, 0]
    assert abs(noise.mean()) < 3 * 5 / len(noise) ** 0.5
    assert noise.std() == pytest.approx(5, rel=0.03)
    assert abs(torch.corrcoef(torch.stack([x[:, 0], noise]))[0, 1]) < 0.05


def test_a_seed_is_another_draw_and_always_the_same():
    assert torch.equal(toy.federation(1).data.y, toy.federation(1).data.y)
    assert not torch.equal(toy.federation(1).data.x, toy.federation(2).data.x)


def test_the_pooled_fit_is_least_squares():
    data = toy.federation(3).data
    x, y = data.x.numpy().astype(float)[:, 0], data.y.numpy().astype(float)[:, 0]
    wanted, residuals, _, _ = np.linalg.lstsq(np.vander(x, 4, increasing=True), y, rcond=None)
    w = toy.least_squares(data)
    np.testing.assert_allclose(w, wanted, rtol=1e-8, atol=1e-8)
    assert toy.mse(w, data) == pytest.approx(residuals[0] / 100)
    assert toy.mse(w, data) < toy.mse(toy.TRUTH, data)


def test_the_module_is_the_cubic_that_errors_are_computed_for():
    module, x = toy.Cubic(), torch.linspace(-7, 8, 9).unsqueeze(1)
    data = Dataset(x, module(x).detach())
    assert toy.mse(module.linear.weight.detach()[0], data) < 1e-6


# How settings are chosen


def test_settings_are_chosen_on_federations_that_are_in_no_table():
    tables, first, last = (set(seeds) for seeds in (range(toy.OTHERS), toy.FULL.first, toy.FULL.last))
    judges = {toy.UNSEEN + seed for seed in first | last}
    everyone = [tables, first, last, judges]
    assert sum(map(len, everyone)) == len(set().union(*everyone))


def test_everyone_has_the_same_trials_of_step_sizes():
    drawn = {label: toy.draws(label, method, 8) for label, method in toy.methods().items()}
    assert {len(trials) for trials in drawn.values()} == {8}
    for label, trials in drawn.items():
        assert trials[0] == {}
        for mine, others in zip(trials[1:], drawn["FedAvg"][1:], strict=True):
            assert mine["train.lr"] == others["train.lr"]
            assert ("server.lr" in mine) == (label != "Pooled")
            assert (len(mine) == 3) == (label in toy.STRENGTH)
            for path, within in toy.STEPS.items():
                assert within.low <= mine.get(path, within.low) <= within.high


def test_strengths_go_from_end_to_end_and_are_of_those_who_have_one():
    assert [*toy.grid("FedProx", 11)[0].values()] == [pytest.approx(0.01)]
    assert [*toy.grid("FedNP", 11)[-1].values()] == [pytest.approx(1000)]
    assert toy.grid("SCAFFOLD", 11) == [{}]


def test_the_last_federations_decide_among_the_best_on_the_first(monkeypatch):
    scores = {0.1: (1.0, 9.0), 0.2: (2.0, 5.0), 0.3: (3.0, 6.0), 0.4: (4.0, 0.0)}
    effort = replace(toy.FULL, left=3)
    monkeypatch.setattr(toy, "score", lambda method, seeds: scores[method.mu][seeds is effort.last])
    chosen, entry = toy.best("FedProx", toy.methods()["FedProx"], [{"mu": mu} for mu in scores], effort)
    assert chosen.mu == 0.2
    assert (entry["chosen"], entry["score"], entry["trials"]) == ({"mu": 0.2}, 5.0, 4)
    assert [trial["score"] for trial in entry["all"]] == [1.0, 2.0, 3.0, 4.0]


# The methods


def test_without_strength_fednp_takes_the_way_of_fedavg():
    methods = toy.methods()
    found = toy.learn(replace(methods["FedNP"], strength=0.0), 0).path
    torch.testing.assert_close(found, toy.learn(methods["FedAvg"], 0).path)


def test_a_spring_of_the_right_strength_is_better_than_none():
    methods, seeds = toy.methods(), range(toy.OTHERS, toy.OTHERS + 4)
    plain = toy.score(methods["FedAvg"], seeds)
    assert toy.score(replace(methods["FedNP"], strength=10.0), seeds) < 0.8 * plain
    assert toy.score(replace(methods["FedProx"], mu=10.0), seeds) < 0.8 * plain


def test_local_curves_are_those_whose_average_comes_next(monkeypatch):
    method = replace(toy.methods()["FedNP"], strength=10.0)
    run = toy.learn(method, 5).run
    local = toy.local(run, 5)
    assert list(local) == ["client 1", "client 2", "client 3"]
    average = sum(share * w for share, w in zip((0.3, 0.2, 0.5), local.values(), strict=True))
    monkeypatch.setattr(toy, "ROUNDS", toy.ROUNDS + 1)
    torch.testing.assert_close(toy.learn(method, 5).path[-1], average, rtol=1e-4, atol=1e-5)


# The table and the figures


def test_every_method_has_its_rows(result, found):
    methods = list(toy.methods())
    wanted = {(method, metric) for method in methods for metric in ("mse", "mse, tuned", "x² coefficient")}
    wanted |= {(toy.FIT, "mse"), (toy.FIT, "x² coefficient")}
    wanted |= {(method, "mse of μ") for method in ("FedNP", "FedNP, f = 0")}
    assert set(found) == wanted
    assert all(math.isfinite(value) for value in found.values())
    assert {row.n for row in result.rows} == {3}
    assert {row.method: row.paper for row in result.rows if row.paper is not None} == toy.PAPER


def test_nobody_beats_the_fit_and_data_in_one_place_are_enough(found):
    fit = found[toy.FIT, "mse"]
    assert all(value > fit for (method, metric), value in found.items() if "mse" in metric and method != toy.FIT)
    assert found["Pooled", "mse"] < 2.5 * fit
    assert found["FedAvg", "mse"] > 5 * found["Pooled", "mse"]


def test_what_was_tried_is_written_down(result):
    tried = {entry["method"]: entry for entry in result.tuning}
    assert set(tried) == {f"{method}, tuned" for method in toy.methods()} | set(toy.STRENGTH)
    assert all(len(entry["all"]) == entry["trials"] == 2 for entry in tried.values())
    assert {(entry["versus"], entry["metric"]) for entry in result.paired} == {
        (method, metric) for method in toy.methods() if method != "FedNP" for metric in ("mse", "mse, tuned")
    }


def test_the_band_is_three_deviations_of_the_cubics(result):
    panel = result.figures[0].panels[2]
    curves = {curve.label: np.array(curve.y) for curve in panel.curves}
    x = np.array(panel.curves[0].x)
    above, below = (np.abs(curves[label] - curves["FedNP"]) / 3 for label in ("+3 sd", "−3 sd"))
    np.testing.assert_allclose(above, below)
    v, residuals, _, _ = np.linalg.lstsq(np.vander(x**2, 4, increasing=True), above**2, rcond=None)
    assert residuals[0] < 1e-6 * (above**4).sum()  # Φ(x) v Φ(x)ᵀ = Σ v_i x^2i, with one v for all x
    assert (v > 0).all()


def test_the_figures_have_all_curves_and_only_numbers(result):
    pieces, course = result.figures
    for panel, method in zip(pieces.panels, ("FedAvg", "FedNP"), strict=False):
        assert {curve.label for curve in panel.curves} == {toy.FIT, method, "client 1", "client 2", "client 3"}
        assert len(panel.marks) == 20
    assert {curve.label for curve in course.panels[0].curves} == set(toy.methods())
    assert {curve.label for curve in course.panels[1].curves} == set(toy.STRENGTH)
    for panel in (*pieces.panels, *course.panels):
        assert all(math.isfinite(y) for curve in panel.curves for y in curve.y)


def test_the_report_shows_methods_and_figures(result, folder):
    page = write_report(folder).read_text()
    assert all(html.escape(method) in page for method in toy.methods())
    assert page.count("<figure") >= len(result.figures)
