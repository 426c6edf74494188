"""FedLangevin: its limits, and the posterior that it samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.algorithms import FedLangevin
from consilience.core.errors import ConfigError
from consilience.optim import SGD, SGLD
from support.scenarios import linear

ENGINE = cs.Simulator(device="cpu", chunk=6, workers=1, precision="float64")
PRIOR = 1.0


def fit(method, task, federation, **options):
    options = {"engine": ENGINE, "progress": False} | options
    return cs.fit(method, task, federation, **options)


# Limits


def test_without_noise_and_variates_it_is_fedavg():
    task, federation = linear()
    settings = {"lr": 0.1, "epochs": 2, "batch_size": 3}
    cold = FedLangevin(SGLD(temperature=0.0, **settings), prior=0.0, variates=False)
    runs = [fit(method, task, federation, rounds=4, cohort=3) for method in (cold, cs.FedAvg(SGD(**settings)))]
    torch.testing.assert_close(runs[0].server.model.theta, runs[1].server.model.theta)


def test_without_noise_and_with_clients_of_one_size_it_is_scaffold():
    task, federation = linear(sizes=(6, 6, 6, 6), names=None, spread=1.0)
    settings = {"lr": 0.1, "epochs": 2, "batch_size": 3}
    cold = FedLangevin(SGLD(temperature=0.0, **settings), prior=0.0)
    scaffold = cs.SCAFFOLD(SGD(**settings), variate="gradient")
    runs = [fit(method, task, federation, rounds=5, cohort=3, debug=True) for method in (cold, scaffold)]
    torch.testing.assert_close(runs[0].server.model.theta, runs[1].server.model.theta)


# Samples


def plane(features=200, clients=(9, 5, 2), seed=0):
    """Many independent linear models of two weights: their posteriors have one precision, so whitened samples of one
    run are many draws of one distribution. Inputs and slopes differ by client.

    (task, federation, precision [2, 2], posterior means [features, 2])"""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(clients), 2, generator=made, dtype=torch.float64)
    owner = torch.arange(len(clients)).repeat_interleave(torch.tensor(clients))
    x = x + owner.unsqueeze(1) * torch.tensor([1.0, -0.5])
    y = torch.randn(sum(clients), features, generator=made, dtype=torch.float64)
    y = y + 2 * x.sum(1, keepdim=True) * (1 + owner.unsqueeze(1))
    module = nn.Linear(2, features, bias=False).double()
    nn.init.zeros_(module.weight)
    precision = x.mT @ x + PRIOR * torch.eye(2, dtype=torch.float64)
    means = torch.linalg.solve(precision, x.mT @ y).mT
    return cs.Regression(module), cs.Federation.from_owner(cs.Dataset(x, y), owner), precision, means


def whitened(method, rounds=80, warm=30):
    """Samples after `warm` rounds, in units in which those of the posterior are standard normal."""
    task, federation, precision, means = plane()
    samples = []
    fit(method, task, federation, rounds=rounds, callbacks=[lambda run, _: samples.append(run.server.model.theta)])
    root = torch.linalg.cholesky(precision)
    return (torch.stack(samples[warm:]).view(-1, *means.shape) - means) @ root


def moments(white):
    """The distances of mean and covariance from those of the posterior."""
    flat = white.reshape(-1, 2)
    return float(flat.mean(0).norm()), float((flat.mT @ flat / len(flat) - torch.eye(2)).norm())


def sampler(lr, epochs=1):
    return SGLD(lr=lr, epochs=epochs, batch_size=100)


def test_one_step_a_round_samples_the_pooled_posterior_as_langevin_dynamics_does():
    lr = 0.3
    white = whitened(FedLangevin(sampler(lr), prior=PRIOR, variates=False)).reshape(-1, 2)
    _, federation, precision, _ = plane()
    values, vectors = torch.linalg.eigh(torch.linalg.cholesky(precision).mT @ torch.linalg.cholesky(precision))
    expected = 1 / (1 - lr * values / federation.examples / 2)  # a finite step widens the samples by exactly this
    along = white @ vectors
    torch.testing.assert_close(along.mT @ along / len(along), expected.diag(), rtol=0.05, atol=0.05)
    assert float(along.mean(0).abs().max()) < 0.05


@pytest.mark.slow
def test_control_variates_keep_several_steps_at_the_posterior():
    drifting, corrected = (
        moments(whitened(FedLangevin(sampler(0.1, epochs=8), prior=PRIOR, variates=variates)))
        for variates in (False, True)
    )
    assert corrected[0] < 0.05 < 0.25 < drifting[0]


@pytest.mark.slow
def test_the_error_goes_with_the_step():
    errors = [
        moments(whitened(FedLangevin(sampler(lr, epochs=4), prior=PRIOR), rounds=int(30 / lr), warm=int(5 / lr)))
        for lr in (0.25, 0.07)
    ]
    assert errors[1][1] < 0.5 * errors[0][1]
    assert errors[1][1] < 0.15
    assert errors[1][0] < 0.07


def test_part_of_the_clients_has_its_share_of_the_noise():
    """Inputs are 0, so no gradient moves the weights: the variance of a round is that of all clients."""
    federation = cs.Federation.from_owner(cs.Dataset(torch.zeros(12, 20_000), torch.zeros(12, 1)), torch.arange(12) % 6)
    task = cs.Regression(nn.Linear(20_000, 1, bias=False))
    method = FedLangevin(SGLD(lr=0.5, batch_size=2), prior=0.0)
    for cohort in (2, 6):
        run = fit(method, task, federation, rounds=1, cohort=cohort)
        moved = run.server.model.theta - run.task.initial()
        assert float(moved.var()) == pytest.approx(2 * 0.5 / 12, rel=0.05)


# The belief


def test_the_belief_is_the_last_samples_after_burn_in():
    task, federation = linear()
    method, seen = FedLangevin(sampler(0.05), burn_in=3, thin=2, keep=2), []
    counts = []

    def watch(run, _):
        seen.append(run.server.model.theta)
        counts.append(len(run.posterior.theta))

    run = fit(method, task, federation, rounds=10, callbacks=[watch])
    assert counts == [1, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    assert torch.equal(run.posterior.theta, torch.stack([seen[6], seen[8]]))


def test_it_needs_a_sampler():
    with pytest.raises(ConfigError, match="train"):
        FedLangevin(SGD())
