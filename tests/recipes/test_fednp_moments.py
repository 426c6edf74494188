"""The ways to tilted moments, at the small size of the recipe."""

import math

import pytest
import torch

from consilience.inference.sigmoid_moments import WAYS
from consilience.recipes import fednp_moments
from consilience.recipes.base import Options


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    result = fednp_moments.run(Options(quick=True, seeds=2, out=tmp_path_factory.mktemp("moments")))
    torch.set_num_threads(threads)
    return result


@pytest.fixture(scope="module")
def found(result):
    """The mean of every row, by (method, metric)."""
    return {(row.method, row.metric): row.mean for row in result.rows}


def test_every_way_has_every_row(result, found):
    metrics = {
        f"{metric}{suffix}" for metric in ("negative_share", "mean_error", "var_error") for suffix in ("", ", wide")
    }
    assert set(found) == {(method, metric) for method in WAYS for metric in (*metrics, "ms")}
    assert all(math.isfinite(value) and value >= 0 for value in found.values())
    assert {row.n for row in result.rows} == {2}


def test_only_the_printed_variance_is_often_negative(found):
    assert 0.3 < found["printed", "negative_share"] < 0.45
    assert [found[method, "negative_share"] for method in ("corrected", "derivative", "quadrature")] == [0, 0, 0]
    assert 0.03 < found["corrected", "negative_share, wide"] < 0.15
    assert found["derivative", "negative_share, wide"] == 0


@pytest.mark.parametrize("suffix", ["", ", wide"])
def test_the_nearer_the_better(found, suffix):
    for metric in ("mean_error", "var_error"):
        errors = [found[method, metric + suffix] for method in ("quadrature", "derivative", "corrected", "printed")]
        assert errors == sorted(errors)
    assert found["quadrature", "mean_error" + suffix] < 1e-5


def test_one_sigmoid_costs_less_than_96(found):
    assert found["derivative", "ms"] < found["quadrature", "ms"]


def test_the_figure_has_the_exact_curve_and_nothing_that_is_not_a_number(result):
    panels = result.figures[0].panels
    assert {curve.label for curve in panels[0].curves} == {*WAYS, fednp_moments.EXACT}
    assert all(math.isfinite(y) for panel in panels for curve in panel.curves for y in curve.y)
