"""DPPVI: its limits, the length of what an example can change, its noise, and ε."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.algorithms import DPPVI, PVI, epsilon
from consilience.algorithms.dp_pvi import _in_units
from consilience.core.errors import ConfigError, ConsilienceError, DataError
from consilience.core.records import leaves
from support.scenarios import linear

ENGINE = cs.Simulator(device="cpu", chunk=3, workers=1, precision="float64")
INFER = cs.inference.Variational(cs.optim.IVON(epochs=2, batch_size=4))
DIAGONAL = cs.inference.Newton(steps=1, diagonal=True)
OPEN = {"clip": None, "noise": 0.0}


def fit(method, task=None, federation=None, **options):
    if task is None:
        task, federation = linear()
    options = {"rounds": 2, "engine": ENGINE, "progress": False, "debug": True} | options
    return cs.fit(method, task, federation, **options)


def same(found, expected, tolerance=1e-10):
    for (name, x), (_, y) in zip(leaves(found.server), leaves(expected.server), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


# Limits


@pytest.mark.parametrize("infer", [INFER, DIAGONAL, cs.inference.Identity()], ids=lambda infer: infer.letter)
@pytest.mark.parametrize("open_", [OPEN, {"clip": 1e9, "noise": 0.0}], ids=["no clip", "wide clip"])
def test_without_noise_and_clipping_it_is_pvi(infer, open_):
    same(fit(DPPVI(infer, **open_), rounds=3, cohort=3), fit(PVI(infer), rounds=3, cohort=3))


def tiles(clients=3, each=8):
    """A linear model with features of which an example has one, so that precisions are diagonal."""
    made, count = torch.Generator().manual_seed(1), clients * each
    x = torch.eye(2)[torch.arange(count) % 2] * (1 + torch.rand(count, 1, generator=made))
    y = x @ torch.tensor([[1.0], [-2.0]]) + 0.3 * torch.randn(count, 1, generator=made)
    module = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(module.weight)
    clients = cs.Federation.from_owner(cs.Dataset(x, y), torch.arange(count) // each)
    x, y = x.double(), y.double()
    exact = cs.Gaussian((x.mT @ y)[:, 0], x.mT @ x + torch.eye(2).double())
    return cs.Regression(module), clients, exact


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_of_exact_clients_find_the_posterior_of_all_data(parts):
    task, clients, exact = tiles()
    run = fit(DPPVI(DIAGONAL, damping=1.0, parts=parts, **OPEN), task, clients, rounds=1)
    torch.testing.assert_close(run.posterior.lam, exact.lam.diagonal())
    torch.testing.assert_close(run.posterior.mean, exact.mean)


# Privacy


def sent(method, federation, task):
    """The updates of a first round in units of q, [K, …]."""
    task = task.prepare(dtype=torch.float64)
    info = cs.data.Info(task.initial(), *torch.tensor([0, len(federation), federation.examples]))
    ids, n = torch.arange(len(federation)), federation.sizes.double().unsqueeze(1)
    cohort = cs.data.Cohort(federation, ids, round=1, round_size=len(ids), seed=0, dtype=torch.float64)
    q = method.start(task, info).q
    update, _ = method.local(task, method.message(method.start(task, info), ids), method.client(task, info, n), cohort)
    return _in_units(update ** len(ids), q)


@pytest.mark.parametrize(("parts", "clip"), [(1, 0.1), (2, 0.1), (4, 1e-3)])
def test_another_example_changes_the_update_by_no_more_than_two_clips_of_a_part(parts, clip):
    task, clients, _ = tiles()
    method = DPPVI(INFER, clip=clip, noise=0.0, parts=parts)
    before = sent(method, clients, task)
    clients.data.y[0] = 1e4
    after = sent(method, clients, task)
    change = (after - before).norm(dim=1)
    assert 0 < float(change[0]) <= 2 * clip / parts + 1e-9
    assert torch.equal(change[1:], torch.zeros(2).double())
    assert float(before.norm(dim=1).max()) <= clip + 1e-9


@pytest.mark.parametrize("noise_from", ["seed", "system"])
@pytest.mark.parametrize("parts", [1, 2])
def test_noise_is_that_of_a_part_s_clip(noise_from, parts):
    made = torch.Generator().manual_seed(0)
    federation = cs.Federation.from_owner(
        cs.Dataset(torch.randn(12, 4000, generator=made), torch.zeros(12, 1)), torch.arange(12) % 2
    )
    still = cs.inference.Variational(cs.optim.IVON(lr=0.0, beta2=1 - 1e-12))
    method = DPPVI(still, clip=0.2, noise=0.5, parts=parts, noise_from=noise_from)
    u = sent(method, federation, cs.Regression(nn.Linear(4000, 1)))
    torch.testing.assert_close(u.std(1), torch.full((2,), 0.1 / parts).double(), rtol=0.05, atol=0)
    assert abs(float(torch.corrcoef(u)[0, 1])) < 0.05


def test_the_sites_have_the_noise_too_so_their_product_is_q():
    run = fit(DPPVI(INFER, clip=0.5, noise=2.0), rounds=5)
    assert all(line["audit"]["q_apart_from_sites"] < 1e-10 for line in run.history)
    assert not torch.equal(run.posterior.eta, fit(DPPVI(INFER, clip=0.5, noise=0.0), rounds=5).posterior.eta)


def test_much_noise_leaves_a_tenth_of_the_precision_and_is_counted():
    run = fit(DPPVI(INFER, clip=1.0, noise=30.0, noise_from="seed"), rounds=1)
    fresh = fit(PVI(cs.inference.Variational(cs.optim.IVON(lr=0.0))), rounds=1)
    assert run.history[0]["guards"]["noisy precision raised"] > 0
    assert bool((run.posterior.lam >= 0.0999 * fresh.posterior.lam).all())


def test_only_noise_of_the_seed_repeats():
    for noise_from, repeats in (("seed", True), ("system", False)):
        a, b = (fit(DPPVI(INFER, noise_from=noise_from)).posterior.eta for _ in range(2))
        assert torch.equal(a, b) == repeats


# ε


def test_every_round_reports_epsilon():
    run = fit(DPPVI(INFER, noise=4.0, delta=1e-4, parts=1), rounds=3)
    assert [line["epsilon"] for line in run.history] == pytest.approx([epsilon(4.0, 1, 1, r, 1e-4) for r in (1, 2, 3)])
    assert "epsilon" not in fit(DPPVI(INFER, **OPEN)).history[-1]


def test_noise_in_every_gradient_counts_by_epochs_and_the_smaller_epsilon_holds():
    train = cs.optim.DPSGD(lr=0.01, epochs=3, noise=5.0, noise_from="seed")
    inside = DPPVI(cs.inference.Identity(train), **OPEN)
    assert inside.spent(4) == epsilon(5.0, 1, 1, 12, 1e-5)
    both = dataclasses.replace(inside, clip=1.0, noise=20.0)
    assert both.spent(4) == epsilon(20.0, 1, 1, 4, 1e-5) < inside.spent(4)
    curved = DPPVI(cs.inference.Laplace(train), **OPEN)  # whose curvature sees the data without noise
    assert curved.spent(4) == float("inf")
    assert fit(inside).history[-1]["epsilon"] == pytest.approx(inside.spent(2))


# Refusals


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"infer": cs.inference.Newton()}, "DPPVI needs diagonal precisions"),
        ({"clip": None}, "noise hides updates of a bounded length only"),
        ({"delta": 1.0}, "DPPVI: delta must be below 1"),
    ],
)
def test_what_cannot_be_private_is_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        DPPVI(**settings)


def test_after_another_method_and_with_too_few_examples_it_is_refused():
    task, federation = linear()
    with pytest.raises(ConfigError, match="DPPVI must be the whole run"):
        fit(cs.Switch(cs.FedAvg(), DPPVI(INFER), at=1), task, federation)
    with pytest.raises(DataError):
        fit(DPPVI(INFER, parts=2), task, federation)  # one client has one example
    with pytest.raises(ConsilienceError, match="divide them no further"):
        fit(DPPVI(INFER, parts=2), *tiles()[:1], tiles()[1].stream(2))


def test_without_the_accountant_it_says_what_to_install_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"pip install consilience\[privacy\]"):
        DPPVI()
    assert DPPVI(**OPEN).noise == 0
