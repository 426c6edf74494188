"""One temperature of a posterior: where the answer is known, sums over clients, and what has none."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import DataError, TaskError
from consilience.evaluation.tempering import GRID, temper
from support.planes import belief, cloud, plane
from support.scenarios import blobs

TRAIN = cs.SGD(lr=0.1, epochs=2, batch_size=8)


def labelled(count: int = 60) -> cs.Dataset:
    data = cloud(count)
    return replace(data, y=torch.arange(count) % 3)


@pytest.mark.slow
def test_a_posterior_that_is_too_wide_gets_the_temperature_that_undoes_it() -> None:
    """y = w + noise, w ~ N(0, V): the predictive variance is V T + 1, and data of variance 1.5 want T = 0.5/V."""
    made = torch.Generator().manual_seed(0)
    y = 1.5**0.5 * torch.randn(4000, 1, generator=made).double()
    task = cs.Regression(nn.Linear(1, 1, bias=False), noise=1.0).prepare(dtype=torch.float64)
    data = cs.Dataset(torch.ones(4000, 1).double(), y)
    q = cs.Gaussian(torch.zeros(1).double(), torch.full((1,), 1 / 50, dtype=torch.float64))
    found = temper(task, q, data, samples=400)
    assert found.temperature == pytest.approx(0.01, rel=1e-6)
    for temperature, loss in zip(found.temperatures, found.nll, strict=True):
        variance = 50 * temperature + 1
        exact = 0.5 * (math.log(2 * math.pi * variance) + float(y.square().mean()) / variance)
        assert loss == pytest.approx(exact, abs=0.1), temperature
    torch.testing.assert_close(found(q).variance, q.variance * found.temperature)


def test_losses_of_clients_add_up_to_those_of_all_examples() -> None:
    task, data, q = plane(), labelled(), belief(plane(), 0.5)
    together = temper(task, q, data)
    apart = temper(task, q, cs.partition.iid(data, 4))
    assert apart.losses == pytest.approx(together.losses, rel=1e-9)
    halves = [temper(task, q, data[rows]) for rows in (slice(20), slice(20, None))]
    assert (halves[0] + halves[1]).losses == pytest.approx(together.losses, rel=1e-9)
    assert (apart.examples, apart.temperature) == (60, together.temperature)


def test_a_run_reports_tempered_scores_beside_the_marginal_ones(tmp_path: Any) -> None:
    task, train, test = blobs()
    train, held = train.split(0.3, seed=0)
    method = cs.FedEP(cs.inference.Identity(TRAIN, scale=0.01))  # far too wide
    run = cs.fit(method, task, train, rounds=4, progress=False, out=tmp_path / "run")
    before = run.evaluate(test)
    assert (before.tempered, before.temperature) == (None, None)
    fitted = run.temper(held)
    assert fitted.temperature < 1
    after = run.evaluate(test)
    assert (after.point, after.marginal) == (before.point, before.marginal)
    assert after.tempered is not None
    assert after.marginal is not None
    assert after.tempered["nll"] < after.marginal["nll"]
    cooled = cs.evaluate(run.network, fitted(run.posterior), test).marginal
    assert after.tempered == pytest.approx(cooled)
    assert after.to_json()["temperature"] == fitted.temperature


def test_what_has_no_temperature_is_refused() -> None:
    task, train, test = blobs()
    run = cs.fit(cs.FedAvg(TRAIN), task, train, rounds=1, progress=False)
    with pytest.raises(TaskError, match="only a Gaussian posterior has a temperature, and the belief is a Point"):
        run.temper(test)
    with pytest.raises(DataError, match="the tempering examples are training examples too"):
        run.temper(train)
    with pytest.raises(DataError, match="temperatures are positive numbers"):
        temper(plane(), belief(plane(), 1.0), labelled(), temperatures=[0.0, 1.0])
    with pytest.raises(DataError, match="losses add up for the same temperatures only"):
        _ = temper(plane(), belief(plane(), 1.0), labelled(), temperatures=[1.0]) + temper(
            plane(), belief(plane(), 1.0), labelled()
        )
    assert GRID[12] == 1


def test_an_end_of_the_grid_is_named(caplog: pytest.LogCaptureFixture) -> None:
    temper(plane(), belief(plane(), 1.0), labelled(), temperatures=[64.0, 128.0])
    assert "is at the end of the grid" in caplog.text
