"""SA-FL's ODE and its rates, at the small size of the recipe."""

import json

import pytest
import torch

from consilience.diagnostics import ode
from consilience.recipes import sa_ode
from support import quick
from support.once import once


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the command wrote, and what it printed: it is dear, so that all test processes share it."""
    return once(tmp_path_factory, "sa-ode", launched)


def launched(folder):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    code, said, errors = quick.reproduce("sa-ode", folder / "out")
    torch.set_num_threads(threads)
    (folder / "printed.json").write_text(said)
    return code, errors


@pytest.fixture(scope="module")
def result(folder):
    return json.loads((folder / "printed.json").read_text())


@pytest.fixture(scope="module")
def found(result):
    """The mean of every row, by (method, metric)."""
    return {(row["method"], row["metric"]): row["mean"] for row in result["rows"]}


def test_the_recipe_runs_and_gives_finite_numbers(result, folder):
    quick.assert_finite("sa-ode", result)
    assert (folder / "out" / "report.html").exists()


def tracking(found, method, hospitals):
    return [
        error
        for (who, metric), error in found.items()
        if who == method and metric.startswith("tracking") and metric.endswith("hospitals") == hospitals
    ]


@pytest.mark.parametrize("hospitals", [False, True])
def test_with_tapering_steps_the_mean_follows_its_ode_and_with_a_constant_step_it_does_not(found, hospitals):
    tapering, constant = (tracking(found, method, hospitals) for method in (sa_ode.TAPERING, sa_ode.CONSTANT))
    assert len(tapering) == len(constant) == 5
    assert tapering[0] > 5 * tapering[-1]
    assert constant[0] < 2 * constant[-1]
    metric = "final error" + (", hospitals" if hospitals else "")
    assert found[sa_ode.TAPERING, metric] < 0.3 * found[sa_ode.CONSTANT, metric]


@pytest.mark.parametrize("metric", sa_ode.RATES)
def test_errors_fall_as_fast_as_theory_says(found, metric):
    # 150 rounds still feel the start, and a slope over a decade has a standard deviation of a few hundredths.
    assert found[sa_ode.TAPERING, metric] == pytest.approx(found[sa_ode.THEORY, metric], abs=0.1)


@pytest.mark.parametrize("made", [sa_ode.regression_case, sa_ode.hospital_case], ids=["regressions", "hospitals"])
def test_the_minimiser_is_where_the_field_is_zero(made):
    case = made()
    field = ode.mean_field(sa_ode.plain(case.task), case.federation, case.train)
    assert float(field(case.minimiser).norm()) < 1e-9
    assert float(field(torch.zeros_like(case.minimiser)).norm()) > 0.1


def test_new_measurements_do_not_change_the_expected_gradient():
    task, federation = sa_ode.regressions()
    clean, noisy = (
        ode.mean_field(which, federation, sa_ode.regression_case().train)(task.initial())
        for which in (sa_ode.plain(task), task)
    )
    noise = (noisy - clean).view(sa_ode.REPETITIONS, 2)
    assert float(noise.std()) > 0.1
    assert float((noise.mean(0) / noise.std(0)).abs().max()) < 4 / sa_ode.REPETITIONS**0.5
