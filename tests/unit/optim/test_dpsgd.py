"""DPSGD: clipped gradients of single examples, and their noise."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import ConfigError, TaskError
from consilience.optim import DPSGD, SGD
from support.training import EXACT, SIZES, network, world

QUIET = {"noise": 0.0, "clip": 1e9}


def test_without_clipping_and_noise_it_is_sgd():
    task, group = world()
    settings = {"lr": 0.1, "batch_size": 100, "epochs": 3, "momentum": 0.5, "weight_decay": 0.1}
    found, sgd = (chain(task, task.initial(), group) for chain in (DPSGD(**settings, **QUIET), SGD(**settings)))
    torch.testing.assert_close(found, sgd, **EXACT)


def examples(group, k):
    """The gradients of client k's examples, one by one."""
    module = copy.deepcopy(network())
    start, stop = group.federation.offsets[k : k + 2].tolist()
    chosen = group.federation.order[start:stop]
    x, y = group.federation.data.x[chosen].double(), group.federation.data.y[chosen]
    losses = [nn.functional.cross_entropy(module(x[i : i + 1]), y[i : i + 1]) for i in range(len(y))]
    gradients = [torch.autograd.grad(loss, list(module.parameters())) for loss in losses]
    return torch.stack([nn.utils.parameters_to_vector(g) for g in gradients])


@pytest.mark.parametrize("clip", [0.3, 1.0])
def test_every_example_counts_by_no_more_than_clip(clip):
    task, group = world()
    found = DPSGD(lr=1.0, batch_size=100, clip=clip, noise=0.0)(task, task.initial(), group)
    for k in range(len(SIZES)):
        g = examples(group, k)
        clipped = g * (clip / g.norm(dim=1, keepdim=True)).clamp_max(1)
        assert bool((g.norm(dim=1) > clip).any()) or clip == 1.0
        torch.testing.assert_close(task.initial() - found[k], clipped.mean(0), **EXACT)


def test_a_smaller_last_batch_counts_by_its_examples():
    task, group = world()
    seen = []
    chain = DPSGD(lr=1.0, batch_size=20, **QUIET)
    list(chain.iterates(chain.gradient(task), task.initial(), group, look=lambda _, now: seen.append(now.clone())))
    k, batch = list(group.epoch(0, 20))[1]  # the 13 examples of the first client that are left
    assert (k, int(batch.w.sum())) == (1, 13)
    gradient, _ = task.gradient()(seen[0][:1], batch)
    torch.testing.assert_close(seen[0][:1] - seen[1], gradient * 13 / 20, **EXACT)


@pytest.mark.parametrize("noise_from", ["seed", "system"])
def test_noise_has_the_deviation_of_a_clipped_example(noise_from):
    size = 20_000
    federation = cs.Federation.from_owner(cs.Dataset(torch.zeros(12, 1), torch.zeros(12, 1)), torch.arange(12) % 2)
    group = cs.data.Cohort(federation, torch.arange(2), round=1, round_size=2, seed=0, dtype=torch.float64)

    def nothing(theta, batch, shared=()):
        return torch.zeros_like(theta), theta.new_zeros(len(theta))

    chain = DPSGD(lr=0.5, batch_size=3, epochs=2, clip=0.2, noise=4.0, noise_from=noise_from)
    *_, theta = chain.iterates(nothing, torch.zeros(size, dtype=torch.float64), group)
    expected = 4 * (0.5 * 4.0 * 0.2 / 3) ** 2  # four steps
    torch.testing.assert_close(theta.var(1), torch.full((2,), expected).double(), rtol=0.05, atol=0)
    assert abs(float(torch.corrcoef(theta)[0, 1])) < 0.05


def test_only_noise_of_the_seed_repeats():
    task, group = world()
    for noise_from, same in (("seed", True), ("system", False)):
        chain = DPSGD(batch_size=100, noise_from=noise_from)
        a, b = (chain(task, task.initial(), group) for _ in range(2))
        assert torch.equal(a, b) == same


def test_losses_that_mix_examples_are_refused():
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    with pytest.raises(TaskError, match="DPSGD needs gradients of single examples"):
        DPSGD().gradient(cs.Classification(module))


def test_fedavg_learns_with_it():
    data = cs.load("digits")
    clients = cs.partition.iid(data.train, clients=5)
    task = cs.Classification(cs.models.logistic((8, 8), 10))
    train = DPSGD(lr=0.5, epochs=3, batch_size=50, clip=1.0, noise=1.0, noise_from="seed")
    run = cs.fit(cs.FedAvg(train), task, clients, test=data.test, rounds=10, progress=False)
    assert run.evaluate(data.test).point["accuracy"] > 0.8


def test_mixed_epochs_are_refused():
    with pytest.raises(ConfigError, match="DPSGD's ε counts an example once in a pass"):
        DPSGD(mixed=True, epochs=2)
