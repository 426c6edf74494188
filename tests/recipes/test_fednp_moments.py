"""Approximations of tilted moments, at the small size of the recipe."""

import pytest
import torch

from consilience.recipes import fednp_moments
from consilience.recipes.base import Options
from consilience.recipes.fednp_moments import WAYS


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    result = fednp_moments.run(Options(quick=True, seeds=2, out=tmp_path_factory.mktemp("moments")))
    torch.set_num_threads(threads)
    return result


@pytest.fixture(scope="module")
def found(result):
    """The mean of each row, by (method, metric)."""
    return {(row.method, row.metric): row.mean for row in result.rows}


def test_each_approximation_has_its_rows_and_curves(result, found):
    metrics = [name + suffix for name in ("negative_share", "mean_error", "var_error") for suffix in ("", ", wide")]
    assert set(found) == {(method, metric) for method in WAYS for metric in (*metrics, "ms")}
    assert {row.n for row in result.rows} == {2}
    assert {curve.label for curve in result.figures[0].panels[0].curves} == {*WAYS, fednp_moments.EXACT}


def test_only_the_printed_variance_is_often_negative(found):
    assert 0.3 < found["printed", "negative_share"] < 0.45
    assert [found[method, "negative_share"] for method in ("corrected", "derivative", "quadrature")] == [0, 0, 0]
    assert 0.03 < found["corrected", "negative_share, wide"] < 0.15
    assert found["derivative", "negative_share, wide"] == 0


@pytest.mark.parametrize("suffix", ["", ", wide"])
@pytest.mark.parametrize("metric", ["mean_error", "var_error"])
def test_errors_have_one_order_in_both_ranges(found, metric, suffix):
    errors = [found[method, metric + suffix] for method in ("quadrature", "derivative", "corrected", "printed")]
    assert errors == sorted(errors)
    assert errors[0] < 1e-4


def test_one_sigmoid_costs_less_than_96(found):
    assert found["derivative", "ms"] < found["quadrature", "ms"]
