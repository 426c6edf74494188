"""IVON against its authors' package, and where the answer is known."""

from __future__ import annotations

import copy
from dataclasses import replace

import ivon
import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import ConfigError
from consilience.optim import IVON, SGD, Cosine
from support.training import EXACT, SIZES, network, world

CHAINS = [  # their h0 is rounded to float32
    IVON(lr=0.02, batch_size=5, epochs=2, weight_decay=0.1, h0=0.125),
    IVON(lr=0.1, batch_size=8, epochs=2, weight_decay=0.01, beta1=0.0, beta2=0.8, h0=1.5),
    IVON(lr=0.05, batch_size=100, epochs=3, beta1=0.5, beta2=0.99, h0=0.25, kappa=7.0),
]


def authors(chain, group, k, monkeypatch):
    """(mean, h) of client k after a round of the authors' optimiser with the same noise."""
    module, size = copy.deepcopy(network()), sum(p.numel() for p in network().parameters())
    optimiser = ivon.IVON(
        module.parameters(), lr=chain.lr, ess=chain.kappa * SIZES[k], hess_init=chain.h0, beta1=chain.beta1,
        beta2=chain.beta2, weight_decay=chain.weight_decay, rescale_lr=False,
    )  # fmt: skip
    for epoch in range(chain.epochs):
        for step, (live, batch) in enumerate(group.epoch(epoch, chain.batch_size)):
            if k >= live:
                continue
            noise = group.noise(live, size, tag=f"chain {epoch} {step}")[k]
            monkeypatch.setattr(torch, "randn", lambda *_, noise=noise, **__: noise)
            real = int(batch.w[k].sum())
            with optimiser.sampled_params(train=True):
                optimiser.zero_grad()
                nn.functional.cross_entropy(module(batch.x[k, :real]), batch.y[k, :real]).backward()
            optimiser.step()
    monkeypatch.undo()
    mean = nn.utils.parameters_to_vector(module.parameters()).detach()
    return mean, optimiser.param_groups[0]["hess"]


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_every_client_ends_where_the_authors_optimiser_ends(chain, monkeypatch):
    task, group = world()
    memory = chain.memory(task.initial().expand(len(SIZES), -1))
    *_, theta = chain.iterates(task.gradient(), task.initial(), group, memory=memory)
    for k in range(len(SIZES)):
        mean, h = authors(chain, group, k, monkeypatch)
        torch.testing.assert_close(theta[k], mean, **EXACT)
        torch.testing.assert_close(memory[1][k], h, **EXACT)


def test_a_gaussian_prior_is_weight_decay_around_its_mean():
    task, group = world()
    chain, flat = IVON(batch_size=5, weight_decay=0.2), IVON(batch_size=5)
    prior = cs.Gaussian(torch.zeros(task.size).double(), torch.full((1,), 0.2, dtype=torch.float64))
    torch.testing.assert_close(
        flat(task, task.initial(), group, prior=prior), chain(task, task.initial(), group), **EXACT
    )


def test_a_schedule_scales_its_steps():
    task, group = world()
    slow = IVON(lr=0.1, batch_size=5, schedule=Cosine("rounds", total=10, floor=0.5))
    torch.testing.assert_close(
        slow(task, task.initial(), group), IVON(lr=0.1, batch_size=5)(task, task.initial(), group), **EXACT
    )


def line(precision):
    """40 clients with the same targets of a line through two features that are orthogonal, and their posterior."""
    made, clients, n = torch.Generator().manual_seed(3), 40, 16
    x = torch.zeros(n, 2)
    x[: n // 2, 0], x[n // 2 :, 1] = 1.0, 0.5
    y = x @ torch.tensor([[1.0], [-2.0]]) + 0.3 * torch.randn(n, 1, generator=made)
    data = cs.Dataset(x.repeat(clients, 1), y.repeat(clients, 1))
    federation = cs.Federation.from_owner(data, torch.arange(clients).repeat_interleave(n))
    module = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(module.weight)
    task = cs.Regression(module).prepare(dtype=torch.float64)
    group = cs.data.Cohort(federation, torch.arange(clients), round=1, round_size=clients, seed=0, dtype=torch.float64)
    cavity = cs.Gaussian.of(torch.tensor([0.5, 0.0]).double(), torch.tensor(precision).double())
    design = x.double()
    return task, group, cavity, cs.Gaussian((design.mT @ y.double())[:, 0], (design.mT @ design).diagonal()) * cavity


@pytest.mark.slow
@pytest.mark.parametrize("power", [1.0, 0.5])
def test_variational_inference_finds_a_posterior_that_has_its_form(power):
    task, group, cavity, posterior = line([3.0, 5.0])
    infer = cs.inference.Variational(IVON(lr=0.02, epochs=500, batch_size=16, beta2=0.98, h0=1.0))
    found = infer.near(task, cavity, cavity, group, power)
    torch.testing.assert_close(found.lam.mean(0), power * posterior.lam, rtol=0.04, atol=0)
    torch.testing.assert_close(found.mean.mean(0), posterior.mean, rtol=0, atol=0.02)


@pytest.mark.slow
def test_kappa_multiplies_the_likelihood_and_not_the_cavity():
    task, group, cavity, posterior = line([3.0, 5.0])
    infer = cs.inference.Variational(IVON(lr=0.02, epochs=500, batch_size=16, beta2=0.98, h0=1.0, kappa=4.0))
    found = infer(task, cavity, cavity.mean, group)
    torch.testing.assert_close(found.lam.mean(0), (posterior / cavity).lam * 4 + cavity.lam, rtol=0.04, atol=0)


def test_without_steps_the_result_is_the_belief_that_it_starts_from():
    task, group = world()
    q = cs.Gaussian.of(task.initial(), torch.linspace(1, 5, task.size).double())
    cavity = q / cs.Gaussian.of(task.initial().expand(len(SIZES), -1), torch.full((len(SIZES), 1), 0.3).double())
    found = cs.inference.Variational(IVON(lr=0.0, beta2=1 - 1e-12, weight_decay=0.1)).near(task, cavity, q, group, 0.5)
    torch.testing.assert_close(found.mean, q.mean.expand(len(SIZES), -1), **EXACT)
    torch.testing.assert_close(found.lam, q.lam.expand(len(SIZES), -1), rtol=1e-6, atol=0)


def test_variational_inference_needs_ivon():
    with pytest.raises(ConfigError, match="train"):
        cs.inference.Variational(SGD())


def test_a_sharper_likelihood_leaves_less_noise():
    """One step from the same state: the sample's distance is 1/√(κ n (h + d))."""
    task, group = world()
    seen = []

    def gradient(theta, batch, shared=()):
        seen.append(theta.clone())
        return torch.zeros_like(theta), theta.new_zeros(len(theta))

    wide = IVON(lr=0.0, batch_size=100, h0=0.5, weight_decay=0.1)
    for chain in (wide, replace(wide, kappa=4.0)):
        list(chain.iterates(gradient, task.initial(), group))
    a, b = (points - task.initial() for points in seen)
    torch.testing.assert_close(a, 2 * b, **EXACT)
    noise = group.noise(len(SIZES), task.size, tag="chain 0 0")
    n = torch.tensor(SIZES).double().unsqueeze(1)
    torch.testing.assert_close(a, noise / (0.6 * n).sqrt(), **EXACT)
