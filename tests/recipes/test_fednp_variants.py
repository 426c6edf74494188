"""Variants of FedNP that its recipes compare."""

import pytest
import torch

import consilience as cs
from consilience.algorithms.fednp import NETWORK, SIGNAL
from consilience.recipes.fednp import PooledSignal, WithoutSignal, everyone
from consilience.recipes.parabola import DetachedSignal, LossSignal
from support.one_shot import learn
from support.scenarios import blobs

TRAIN = cs.SGD(lr=0.1, epochs=2, batch_size=8)
SMALL = {"latent": 3, "hidden": 4}


def gradient(method, part):
    """The gradient of the added terms of the loss in one network's weights, at its initial weights."""
    task = method.adapt(blobs()[0], 0).prepare(dtype=torch.float64)
    data = blobs()[1].data
    batch = cs.data.Batch(data.x[None].double(), data.y[None], torch.ones(1, len(data)).double(), torch.tensor([3]))
    cavity = torch.full((1, 3), 0.5).double(), torch.ones(1, 3).double()
    return task.gradient(method.loss)(task.initial()[None], batch, *cavity)[0][0, task.slice(part)]


def test_with_one_f_all_coordinates_of_z_stay_equal():
    task, train, _ = blobs()
    one, many = (learn(kind(TRAIN, **SMALL), task, train, rounds=3).server.q for kind in (PooledSignal, cs.FedNP))
    for leaf in (one.eta, one.lam):
        torch.testing.assert_close(leaf, leaf[:1].expand(3))
    assert one.mean.abs().min() > 1e-3
    assert (many.mean - many.mean[0])[1:].abs().min() > 1e-3


def test_without_a_signal_z_stays_standard_normal_and_the_prediction_still_learns():
    task, train, _ = blobs()
    method = WithoutSignal(TRAIN, **SMALL)
    run = learn(method, task, train, rounds=3, cohort=4, debug=True)
    assert method.name == "FedNP, f = 0"
    assert (run.history[-1]["z_mean"], run.history[-1]["z_sd"]) == (0, 1)
    moved = run.posterior.mean - run.task.initial()
    assert not moved[run.task.slice(SIGNAL)].any()
    assert moved[run.task.slice(NETWORK)].abs().max() > 1e-4


@pytest.mark.parametrize("kind", [LossSignal, DetachedSignal])
def test_f_sees_losses_and_learns_unless_it_is_detached(kind):
    method = kind(TRAIN, strength=1.0, signal_hidden=2, **SMALL)
    assert bool(gradient(method, SIGNAL).any()) is (kind is LossSignal)
    assert gradient(method, NETWORK).any()


def test_as_printed_fednp_has_one_f_and_undamped_sites():
    printed = everyone(cs.SGD(), as_printed=True)["FedNP"]
    assert isinstance(printed, PooledSignal)
    assert printed.damping == 1
