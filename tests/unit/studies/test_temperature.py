"""A posterior's temperature, by held-out examples."""

import logging
from dataclasses import replace

import pytest
import torch

import consilience as cs
from consilience.core.errors import ConfigError
from consilience.evaluation import evaluate
from consilience.studies import fit_temperature
from support.scenarios import blobs, linear

ENGINE = cs.Simulator(device="cpu", chunk=6, workers=1, precision="float64")
TRAIN = cs.SGD(lr=0.1, epochs=3, batch_size=5)


@pytest.fixture(scope="module")
def learned():
    task, train, test = blobs()
    method = cs.FedEP(cs.inference.Identity(TRAIN, scale=0.05))
    return cs.fit(method, task, train, rounds=5, engine=ENGINE, progress=False), test


def widened(run, factor):
    """The same run, with a posterior whose variances are `factor` times as large."""
    return replace(run, server=replace(run.server, q=run.server.q ** (1 / factor)))


def test_the_temperature_has_the_lowest_nll_of_marginal_predictions(learned):
    run, test = learned
    fitted = fit_temperature(run, test)
    q = run.posterior
    for temperature, nll in fitted.nll.items():
        belief = cs.Gaussian(q.eta / temperature, q.lam / temperature)
        assert nll == pytest.approx(evaluate(run.network, belief, test).marginal["nll"], rel=1e-9)
    assert fitted.nll[fitted.temperature] == min(fitted.nll.values()) < fitted.nll[1.0]
    torch.testing.assert_close(fitted.belief.mean, q.mean)
    torch.testing.assert_close(fitted.belief.variance, fitted.temperature * q.variance)


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_posterior_that_is_too_wide_is_narrowed_as_much(learned, factor):
    run, test = learned
    grid = [2.0**k for k in range(-14, 8)]
    own, other = (fit_temperature(one, test, grid) for one in (run, widened(run, factor)))
    assert other.temperature == own.temperature / factor
    torch.testing.assert_close(other.belief.variance, own.belief.variance)


def test_clients_nll_add_up(learned):
    run, test = learned
    alone = [fit_temperature(run, test.client(k)).nll for k in range(len(test))]
    for temperature, nll in fit_temperature(run, test).nll.items():
        total = sum(n * one[temperature] for n, one in zip(test.sizes.tolist(), alone, strict=True))
        assert nll == pytest.approx(total / test.examples, rel=1e-9)


def test_with_the_right_posterior_a_linear_model_needs_no_temperature():
    """Fresh points of a Bayesian linear regression: the exact posterior predicts better than one 16 times as wide or
    narrow."""
    made = torch.Generator().manual_seed(0)
    w, noise, runs = torch.randn(5, 1, generator=made), 1.0, []
    x = torch.randn(2008, 5, generator=made)
    y = x @ w + noise * torch.randn(2008, 1, generator=made)
    data = cs.Dataset(x, y)
    federation = cs.Federation.from_owner(data[:8], torch.arange(8) % 2)
    task = cs.Regression(torch.nn.Linear(5, 1, bias=False), noise=noise)
    method = cs.FedEP(cs.inference.Newton(), prior=0.01, damping=1.0)
    runs = cs.fit(method, task, federation, rounds=4, engine=ENGINE, progress=False)
    fitted = fit_temperature(runs, data[8:], [1 / 16, 1.0, 16.0], samples=400)
    assert fitted.temperature == 1


def test_an_end_of_the_grid_is_named(learned, caplog):
    run, test = learned
    with caplog.at_level(logging.WARNING, logger="consilience"):
        fit_temperature(run, test, [64.0, 128.0])
    assert "the best temperature, 64, is at the end of the grid" in caplog.text


def test_what_has_no_posterior_no_nll_or_no_temperature_is_refused(learned):
    run, test = learned
    task, train, _ = blobs()
    point = cs.fit(cs.FedAvg(TRAIN), task, train, rounds=1, engine=ENGINE, progress=False)
    with pytest.raises(ConfigError, match="FedAvg has no Gaussian posterior"):
        fit_temperature(point, test)
    for grid in ([], [1.0, 0.0]):
        with pytest.raises(ConfigError, match="temperatures must be positive, and at least one"):
            fit_temperature(run, test, grid)
    plain, federation = linear()
    plain = cs.Supervised(plain.module, loss=lambda out, y: (out - y).square()[:, 0], predict=lambda out: out)
    method = cs.FedEP(cs.inference.Identity(TRAIN))
    other = cs.fit(method, plain, federation, rounds=1, engine=ENGINE, progress=False)
    with pytest.raises(ConfigError, match="a temperature is fitted by the NLL"):
        fit_temperature(other, federation)
