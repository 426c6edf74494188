"""SAM against its formula, and its limits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import ConfigError
from consilience.optim import SAM, SGD
from support.scenarios import linear
from support.training import EXACT, SIZES, network, world


def by_hand(chain, group, k):
    """Client k's weights after a round, one plain gradient after another."""
    module, velocity = copy.deepcopy(network()), 0.0

    def gradient(theta, x, y):
        nn.utils.vector_to_parameters(theta, module.parameters())
        loss = nn.functional.cross_entropy(module(x), y)
        return nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(module.parameters())))

    theta = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    for epoch in range(chain.epochs):
        for live, batch in group.epoch(epoch, chain.batch_size):
            if k >= live:
                continue
            real = int(batch.w[k].sum())
            x, y = batch.x[k, :real], batch.y[k, :real]
            uphill = gradient(theta, x, y)
            g = gradient(theta + chain.rho * uphill / uphill.norm(), x, y) + chain.weight_decay * theta
            velocity = chain.momentum * velocity + g
            theta = theta - chain.lr * velocity
    return theta


@pytest.mark.parametrize(
    "chain", [SAM(lr=0.1, batch_size=5, epochs=2, rho=0.3), SAM(batch_size=8, momentum=0.9, weight_decay=0.1)], ids=str
)
def test_every_client_follows_the_gradient_uphill_of_its_weights(chain):
    task, group = world()
    found = chain(task, task.initial(), group)
    for k in range(len(SIZES)):
        torch.testing.assert_close(found[k], by_hand(chain, group, k), **EXACT)


def test_without_a_radius_it_is_sgd_bit_for_bit():
    task, group = world()
    settings = {"lr": 0.1, "batch_size": 5, "epochs": 2, "momentum": 0.5, "weight_decay": 0.1}
    assert torch.equal(
        SAM(rho=0.0, **settings)(task, task.initial(), group), SGD(**settings)(task, task.initial(), group)
    )


def test_running_averages_of_batchnorm_do_not_shorten_the_way_uphill():
    """They are entries of θ that no loss depends on: SAM of a network that has them moves as without them."""
    made = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 4, generator=made), torch.randint(3, (20,), generator=made)
    federation = cs.Federation.from_owner(cs.Dataset(x, y), torch.arange(20) % 2)
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    weights = []
    for kind in ("averaged", "estimated"):
        task = cs.Classification(copy.deepcopy(module), batch_norm=kind)
        engine = cs.Simulator(device="cpu", precision="float64", chunk=2, workers=1)
        run = cs.fit(cs.FedAvg(SAM(rho=0.5)), task, federation, rounds=2, engine=engine, progress=False)
        names = [name for name, _ in module.named_parameters()]
        weights.append([run.posterior.mean[run.task.slice(parameter=name)] for name in names])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.slow
def test_control_variates_correct_it():
    """FedGAMMA finds the minimum of the mean, where FedSAM drifts to the clients' own."""
    task, federation = linear(sizes=(8, 8, 8, 8), names=None, spread=2.0)
    engine = cs.Simulator(device="cpu", precision="float64", chunk=4, workers=1)
    x = torch.cat([federation.data.x, torch.ones(32, 1)], 1).double()
    best = torch.linalg.lstsq(x, federation.data.y.double()).solution[:, 0]
    chain = SAM(lr=0.1, epochs=10, batch_size=100, rho=1e-4)
    errors = [
        float((cs.fit(method, task, federation, rounds=60, engine=engine, progress=False).posterior.mean - best).norm())
        for method in (cs.FedAvg(chain), cs.SCAFFOLD(chain))
    ]
    assert errors[1] < 0.02 * errors[0]


def test_the_server_s_generators_refuse_it():
    with pytest.raises(ConfigError, match="which SAM does not take"):
        cs.algorithms.F2A(generator=SAM())
