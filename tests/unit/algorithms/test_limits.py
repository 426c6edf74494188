"""Cases with a known answer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import ConfigError

ENGINE = cs.Simulator(device="cpu", precision="float64", chunk=4, workers=1)


@pytest.fixture
def federation():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(120, 4, generator=generator)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) + 0.1 * torch.randn(120, 1, generator=generator) + 0.7
    owner = torch.tensor([0] * 70 + [1] * 30 + [2] * 15 + [3] * 5)
    return cs.Federation.from_owner(cs.Dataset(x, y.float(), name="line"), owner)


@pytest.fixture
def task():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cs.Regression(nn.Linear(4, 1))


def weights(algorithm, task, federation, rounds=5, engine=ENGINE, **options):
    return cs.fit(algorithm, task, federation, rounds=rounds, engine=engine, progress=False, **options).posterior.mean


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_fedprox_without_a_proximal_term_is_fedavg_bit_for_bit(task, federation, precision):
    train = cs.SGD(lr=0.05, momentum=0.9, epochs=3, batch_size=8, weight_decay=0.01)
    engine = cs.Simulator(device="cpu", precision=precision, chunk=4, workers=1)
    fedavg = weights(cs.FedAvg(train), task, federation, rounds=2, engine=engine)
    assert torch.equal(fedavg, weights(cs.FedProx(train, mu=0.0), task, federation, rounds=2, engine=engine))
    assert not torch.equal(fedavg, weights(cs.FedProx(train, mu=0.1), task, federation, rounds=2, engine=engine))


def test_a_large_mu_keeps_clients_near_the_global_weights(task, federation):
    train = cs.SGD(lr=0.01, epochs=5, batch_size=8)
    start = task.initial().double()
    moved = [
        (weights(cs.FedProx(train, mu=mu), task, federation, rounds=1) - start).norm() for mu in (0.0, 1.0, 10.0, 90.0)
    ]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < 0.15 * moved[0]


def test_the_proximal_minimiser_is_that_of_the_penalised_least_squares(task, federation):
    mu = 0.5
    one = federation.pooled()
    got = weights(cs.FedProx(cs.SGD(lr=0.2, epochs=150, batch_size=120), mu=mu), task, one, rounds=1)
    x = torch.cat([federation.data.x.double(), torch.ones(120, 1, dtype=torch.float64)], 1)
    start, n = task.initial().double(), 120
    exact = torch.linalg.solve(
        x.T @ x / n + mu * torch.eye(5, dtype=torch.float64), x.T @ federation.data.y.double()[:, 0] / n + mu * start
    )
    torch.testing.assert_close(got, exact, rtol=1e-8, atol=1e-8)


def test_fedsgd_is_fedavg_with_one_full_batch_step(task, federation):
    fedsgd = weights(cs.algorithms.FedSGD(cs.server.Momentum(lr=0.1), batch_size=16), task, federation)
    fedavg = weights(cs.FedAvg(cs.SGD(lr=0.1, epochs=1, batch_size=10_000)), task, federation)
    torch.testing.assert_close(fedsgd, fedavg, rtol=1e-12, atol=1e-12)


def test_fedsgd_reaches_the_pooled_least_squares_solution(task, federation):
    got = weights(cs.algorithms.FedSGD(cs.server.Momentum(lr=0.5)), task, federation, rounds=120)
    x = torch.cat([federation.data.x.double(), torch.ones(120, 1, dtype=torch.float64)], 1)
    exact = torch.linalg.lstsq(x, federation.data.y.double()).solution[:, 0]
    torch.testing.assert_close(got, exact, rtol=1e-8, atol=1e-8)


def test_fedavg_with_one_client_is_plain_training_is_pooled(task, federation):
    train = cs.SGD(lr=0.05, momentum=0.5, epochs=2, batch_size=32)
    alone = weights(cs.FedAvg(train), task, federation.pooled())
    torch.testing.assert_close(alone, weights(cs.Pooled(train), task, federation), rtol=1e-10, atol=1e-10)


def test_fedavg_is_the_mean_of_the_clients_weighted_by_examples(task, federation):
    train = cs.SGD(lr=0.05, epochs=3, batch_size=8)
    run = cs.fit(cs.LocalOnly(train), task, federation, rounds=1, engine=ENGINE, progress=False)
    alone = torch.stack([run.personal(c).mean for c in range(4)])
    mean = (federation.sizes.double() / 120) @ alone
    torch.testing.assert_close(weights(cs.FedAvg(train), task, federation, rounds=1), mean, rtol=1e-12, atol=1e-12)


def test_a_server_step_of_zero_point_five_goes_half_the_way(task, federation):
    start = task.initial().double()
    whole = weights(cs.FedAvg(), task, federation, rounds=1) - start
    half = weights(cs.FedAvg(server=cs.server.Momentum(lr=0.5)), task, federation, rounds=1) - start
    torch.testing.assert_close(2 * half, whole)


def test_a_negative_mu_is_refused():
    with pytest.raises(ConfigError, match="mu must be at least 0, got -1"):
        cs.FedProx(mu=-1)
