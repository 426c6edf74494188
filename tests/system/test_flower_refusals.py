"""What one registered site can do to FedEP's posterior with finite updates of the right shape: nothing."""

from __future__ import annotations

import pytest
import torch

import consilience as cs
from consilience.flower.messages import TrainReply, encode
from support.flower_grid import BAD, PRIOR, World, assert_consistent, rejected, requested

NEWTON = cs.FedEP(cs.inference.Newton(diagonal=True), prior=PRIOR)


pytestmark = pytest.mark.usefixtures("_unhurried")


@pytest.fixture
def world(tmp_path):
    return lambda **options: World.linear(NEWTON, tmp_path, **options)


def sends(eta=0.0, lam=0.0):
    return lambda delivery: delivery.with_update(lambda delta: cs.Gaussian(delta.eta + eta, delta.lam + lam))


@pytest.mark.parametrize("update", [{"lam": -1000.0}, {"lam": -1e6}, {"lam": 1e6}, {"eta": 1e8}], ids=str)
def test_a_hostile_update_is_refused_and_nobody_follows_it(world, update, caplog):
    there = world(faults={(2, BAD): sends(**update)})
    run = there.serve(4)
    assert rejected(run) == [(2, BAD)]
    assert_consistent(there, run, 4)
    assert f"the update of client {BAD!r} was rejected" in caplog.text


def test_a_refused_site_is_told_why(world, caplog):
    there = world(faults={(2, BAD): sends(lam=1e6)})
    there.serve(4)
    told = [dict(requested(there, round))[BAD].refused for round in (1, 2, 3, 4)]
    assert [bool(reason) for reason in told] == [False, False, True, False]
    assert f"the server refused the last update: {told[2]}" in caplog.text


def test_a_site_that_attacks_in_every_round_leaves_the_posterior_of_the_others(world):
    there = world(always={BAD: sends(lam=-1000.0)})
    run = there.serve(40)
    assert rejected(run) == [(round, BAD) for round in range(1, 41)]
    without = cs.fit(
        NEWTON,
        there.task,
        cs.Federation.from_silos({n: there.data(k) for k, n in enumerate(there.names) if n != BAD}),
        rounds=60,
        engine=cs.Simulator(device="cpu", precision="float64", workers=1),
        progress=False,
    )
    # BAD's factor stays flat, as Newton's sites start without information.
    torch.testing.assert_close(run.posterior.mean, without.posterior.mean, rtol=1e-2, atol=1e-2)


def test_a_site_cannot_gain_precision_by_a_negative_factor_that_it_then_loses(world):
    there = world(faults={(2, BAD): sends(lam=-1e6)})
    there.faults[3, BAD] = lambda delivery: delivery.reply(encode(TrainReply(status="lost", reason="gone")))
    honest = there.serve(1).server.q.lam.max()
    run = there.serve(4)
    assert rejected(run) == [(2, BAD), (3, BAD)]
    assert float(run.server.q.lam.max()) < 10 * float(honest)
