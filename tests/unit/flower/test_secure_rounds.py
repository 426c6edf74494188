"""Rounds under secure aggregation: the simulator's results to the last bit, whoever is lost at whatever step."""

import pytest
import torch

import consilience as cs
from consilience.core.records import leaves
from support.flower_grid import FEDAVG, FEDEP, SCAFFOLD, World, unhurried

POOLING = cs.PartialPooling(FEDEP.infer, prior=0.7)
every_method = pytest.mark.parametrize("method", [FEDAVG, FEDEP, SCAFFOLD, POOLING], ids=lambda method: method.name)


@pytest.fixture(autouse=True)
def quick():
    with unhurried():
        yield


def assert_identical(found, wanted):
    for (name, a), (_, b) in zip(leaves(found), leaves(wanted), strict=True):
        assert torch.equal(a, b), name


@every_method
def test_sites_compute_the_simulators_run_to_the_last_bit(method, tmp_path):
    world = World.linear(method, tmp_path, secure=True)
    run, wanted = world.serve(3), world.simulated(3)
    assert_identical(run.server, wanted.server)
    if method is not FEDAVG:
        for k, site in enumerate(world.names):
            assert_identical(world.state(run, site), wanted.states.gather(torch.tensor([k])))
