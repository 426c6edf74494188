"""Samplers: their noise, their limits, and the posterior that they sample."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from consilience.core.gaussian import Gaussian
from consilience.data import Dataset, Federation
from consilience.data.cohort import Cohort
from consilience.optim import SGD, SGHMC, SGLD
from consilience.tasks.supervised import Regression
from support.training import EXACT, SIZES, walk, world

SETTINGS = {"lr": 0.1, "batch_size": 5, "epochs": 2}


def both(*chains):
    task, group = world()
    return [chain(task, task.initial(), group) for chain in chains]


def test_langevin_dynamics_at_temperature_zero_is_sgd():
    cold, sgd, warm = both(SGLD(**SETTINGS, temperature=0.0), SGD(**SETTINGS), SGLD(**SETTINGS, temperature=1e-6))
    assert torch.equal(cold, sgd)
    assert not torch.equal(cold, warm)


@pytest.mark.parametrize("friction", [0.1, 0.6])
def test_hamiltonian_dynamics_at_temperature_zero_is_sgd_with_momentum(friction):
    cold = SGHMC(**SETTINGS, friction=friction, temperature=0.0)
    torch.testing.assert_close(*both(cold, SGD(**SETTINGS, momentum=1 - friction)), **EXACT)


def test_hamiltonian_dynamics_with_friction_one_is_langevin_dynamics():
    torch.testing.assert_close(
        *both(SGHMC(**SETTINGS, friction=1.0, temperature=0.7), SGLD(**SETTINGS, temperature=0.7)), **EXACT
    )


def test_along_a_zero_gradient_every_step_has_fresh_noise():
    _, group = world()
    chain = SGLD(lr=0.3, batch_size=5, epochs=2, temperature=0.5)
    walked = walk(chain, group, 20_000)
    variances = 2 * 0.3 * 0.5 / torch.tensor(SIZES).double() * chain.steps(group)[:, 0]
    torch.testing.assert_close(walked.var(1), variances, rtol=0.05, atol=0)
    assert float(torch.corrcoef(walked).fill_diagonal_(0).abs().max()) < 0.05  # each client has its own noise


def line(clients):
    """Clients that all hold the same noisy line, so that their chains are independent draws of one posterior: (task,
    cohort, prior, posterior). The prior is wide in one direction and far off in another."""
    made = torch.Generator().manual_seed(4)
    x = torch.randn(12, 2, generator=made)
    y = x @ torch.tensor([[1.0], [-2.0]]) + 0.3 * torch.randn(12, 1, generator=made)
    data = Dataset(x.repeat(clients, 1), y.repeat(clients, 1))
    federation = Federation.from_owner(data, torch.arange(clients).repeat_interleave(12))
    task = Regression(nn.Linear(2, 1), noise=0.8).prepare(dtype=torch.float64)
    group = Cohort(federation, torch.arange(clients), round=1, round_size=clients, seed=0, dtype=torch.float64)
    root = torch.tensor([[2.0, 0.0, 0.0], [1.0, 3.0, 0.0], [0.5, 1.0, 1.0]], dtype=torch.float64)
    prior = Gaussian.of(torch.tensor([3.0, 0.0, 1.0], dtype=torch.float64), root @ root.mT)
    design = torch.cat([x, torch.ones(12, 1)], 1).double()
    posterior = prior * Gaussian((design.mT @ y.double())[:, 0] / 0.64, design.mT @ design / 0.64)
    return task, group, prior, posterior


@pytest.mark.parametrize("chain", [SGLD(lr=0.08, temperature=0.2), SGHMC(lr=0.02, friction=0.3)], ids=["SGLD", "SGHMC"])
def test_samples_are_those_of_the_exact_posterior(chain):
    clients, warm, epochs, n = 400, 40, 90, 12
    task, group, prior, posterior = line(clients)
    chain = replace(chain, batch_size=n, epochs=epochs)
    iterates = chain.iterates(task.gradient(), posterior.mean, group, prior=prior ** (1 / n))
    samples = torch.stack([sample.clone() for epoch, sample in enumerate(iterates) if epoch >= warm])
    values, vectors = torch.linalg.eigh(posterior.lam)
    white = ((samples - posterior.mean) @ vectors * (values / chain.temperature).sqrt()).reshape(-1, 3)
    inertia = 2 - chain.friction if isinstance(chain, SGHMC) else 1.0
    expected = 1 / (1 - chain.lr * values / n / (2 * inertia))  # a finite step widens the samples by exactly this
    assert float(expected.max()) < 1.6
    torch.testing.assert_close(white.mT @ white / len(white), expected.diag(), rtol=0.07, atol=0.07)
    assert float(white.mean(0).abs().max()) < 0.07
