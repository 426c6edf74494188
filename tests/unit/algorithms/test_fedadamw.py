"""FedAdamW against its formulas, and its limits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.algorithms import FedAdamW
from consilience.core.errors import ConfigError
from consilience.optim import AdamW, Cosine
from support.scenarios import linear

ENGINE = cs.Simulator(device="cpu", chunk=5, workers=1, precision="float64")
TRAIN = AdamW(lr=0.02, epochs=3, batch_size=100, weight_decay=0.1)


def fit(method, task, federation, **options):
    return cs.fit(method, task, federation, **{"engine": ENGINE, "progress": False} | options)


def test_the_first_round_is_fedavg_with_adamw():
    task, federation = linear(sizes=(6, 6, 6), names=None)
    runs = [fit(method, task, federation, rounds=1) for method in (FedAdamW(TRAIN), cs.FedAvg(TRAIN))]
    torch.testing.assert_close(runs[0].posterior.mean, runs[1].posterior.mean, rtol=1e-12, atol=0)


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_three_rounds_are_those_by_hand(alpha):
    task, federation = linear()
    run = fit(FedAdamW(TRAIN, alpha=alpha), task, federation, rounds=3)
    w, v, d = torch.zeros(3, 4, dtype=torch.float64)
    t, beta1, beta2 = 0, 0.9, 0.999
    for _ in range(3):
        ends, seconds = [], []
        for client in range(len(federation)):
            data, theta, first, second = federation.client(client), w.clone(), torch.zeros(4), v.clone()
            for k in range(1, 4):
                g = gradient_in_double(data, theta)
                first = beta1 * first + (1 - beta1) * g
                second = beta2 * second + (1 - beta2) * g**2
                step = (first / (1 - beta1**k)) / ((second / (1 - beta2 ** (t + k))).sqrt() + 1e-8)
                theta = theta - 0.02 * (step - alpha * d + 0.1 * theta)
            ends.append(theta - w)
            seconds.append(torch.cat([second[:3].mean().expand(3), second[3:]]))  # a bare layer: weight and bias
        change = torch.stack(ends).mean(0)
        w, v, d, t = w + change, torch.stack(seconds).mean(0), change / (3 * 0.02), t + 3
    torch.testing.assert_close(run.posterior.mean, w, rtol=1e-9, atol=0)


def gradient_in_double(data, theta):
    """∇ of the mean of ½(y − w·x − b)²."""
    ones = torch.cat([data.x, torch.ones(len(data), 1)], dim=1).double()
    return ones.T @ (ones @ theta - data.y[:, 0].double()) / len(data)


def test_layers_have_second_moments_of_their_own_and_running_averages_are_not_pushed():
    made = torch.Generator().manual_seed(0)
    data = cs.Dataset(torch.randn(24, 4, generator=made), torch.randint(3, (24,), generator=made))
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    task = cs.Classification(module, batch_norm="averaged")
    run = fit(FedAdamW(TRAIN), task, cs.Federation.from_owner(data, torch.arange(24) % 3), rounds=3)
    assert len(run.server.v) == 4  # two linear layers, the norm, and running averages
    running = run.task.running != 0
    cohort = cs.data.Cohort(run.federation, torch.arange(3), round=4, round_size=3, seed=0, dtype=torch.float64)
    push = run.algorithm._push(run.task, run.algorithm.message(run.server, cohort.ids), cohort)
    assert bool((run.server.d[running] != 0).all())
    assert not push[:, running].any()
    torch.testing.assert_close(push[0, ~running], 0.02 * 0.5 * run.server.d[~running])


def test_a_schedule_must_be_constant_within_a_round():
    with pytest.raises(ConfigError, match="give the schedule the unit 'rounds'"):
        FedAdamW(AdamW(schedule=Cosine("epochs")))
    FedAdamW(AdamW(schedule=Cosine("rounds")))
