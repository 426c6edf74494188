"""SAFL: the mean of clients whose steps taper off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import consilience as cs
from support.scenarios import blobs, gradient, linear

ENGINE = cs.Simulator(device="cpu", precision="float64", chunk=5, workers=1)
EXACT = {"rtol": 1e-12, "atol": 1e-14}


def learn(algorithm, task, federation, rounds=3, **options):
    return cs.fit(algorithm, task, federation, rounds=rounds, engine=ENGINE, progress=False, **options)


@pytest.mark.parametrize("unit", ["steps", "epochs", "rounds"])
def test_full_batch_descent_with_tapered_steps_follows_the_formulas(unit):
    task, federation = linear()
    factors = (1.0, 0.0, 1.0, 2.0, 0.5)
    schedule = cs.optim.PerClient(unit, factors, cs.optim.Tapered(delta=0.9, unit=unit))
    run = learn(cs.SAFL(cs.SGD(lr=0.3, epochs=2, batch_size=100, schedule=schedule)), task, federation)
    w = task.initial().double()
    data = [cs.Dataset(c.x.double(), c.y.double()) for c in map(federation.client, range(len(federation)))]
    for number in range(1, 4):
        ends = []
        for client, own in zip(data, factors, strict=True):
            here = w.clone()
            for epoch in range(2):
                n = number if unit == "rounds" else 2 * (number - 1) + epoch + 1
                here -= own * 0.3 / n**0.9 * gradient(client, here)
            ends.append(here)
        w = torch.stack(ends).mean(0)
    torch.testing.assert_close(run.posterior.mean, w, rtol=1e-10, atol=1e-12)


def test_with_constant_steps_and_clients_of_one_size_it_is_fedavg():
    task, federation, _ = blobs()
    assert len(set(federation.sizes.tolist())) == 1
    train = cs.SGD(lr=0.1, batch_size=5, epochs=2)
    a, b = (learn(method, task, federation).posterior.mean for method in (cs.SAFL(train), cs.FedAvg(train)))
    torch.testing.assert_close(a, b, **EXACT)


def test_clients_have_equal_weights_unless_they_are_weighted_by_examples():
    task, federation = linear()
    train = cs.SGD(lr=0.1, batch_size=5)
    uniform, weighted, fedavg = (
        learn(method, task, federation).posterior.mean
        for method in (cs.SAFL(train), cs.SAFL(train, by_examples=True), cs.FedAvg(train))
    )
    torch.testing.assert_close(weighted, fedavg, **EXACT)
    assert not torch.allclose(uniform, fedavg)


def test_the_average_is_the_mean_over_all_rounds():
    task, federation = linear()
    path = []
    plain = cs.SAFL(cs.SGD(lr=0.1, batch_size=5, schedule=cs.optim.Tapered()))
    learn(plain, task, federation, callbacks=[lambda run, _: path.append(run.posterior.mean.clone())])
    averaged = learn(replace(plain, average=True), task, federation).posterior.mean
    torch.testing.assert_close(averaged, torch.stack(path).mean(0), rtol=1e-10, atol=1e-12)


def test_tapered_steps_come_closer_to_the_minimum_than_constant_ones():
    task, federation = linear(sizes=(40, 40, 40), names=None)
    noise = 3 * torch.randn(120, 1, generator=torch.Generator().manual_seed(0))
    federation = replace(federation, data=replace(federation.data, y=federation.data.y + noise))
    design = torch.cat([federation.data.x, torch.ones(120, 1)], dim=1).double()
    best = torch.linalg.lstsq(design, federation.data.y.double()).solution.squeeze(1)
    constant, tapered = (
        float((learn(cs.SAFL(train), task, federation, rounds=15).posterior.mean - best).norm())
        for train in (cs.SGD(lr=0.4, batch_size=4, schedule=s) for s in (None, cs.optim.Tapered("steps", 0.8)))
    )
    assert tapered < 0.5 * constant < torch.inf
