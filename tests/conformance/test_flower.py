"""Every algorithm as a real federation: Flower's client app, called in memory, gives the simulator's run."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch

import consilience as cs
from conformance import test_conformance as cases
from consilience.core.errors import ConfigError
from consilience.core.records import leaves
from consilience.flower import Participation, client_app, serve
from consilience.flower import app as flower_app
from consilience.flower.coordinator import Coordinator
from consilience.flower.registry import Registry
from consilience.flower.storage import ClientStorage
from support.flower_grid import MemoryGrid, unhurried

CLIENTS = len(cases.SIZES)


@pytest.fixture(scope="module")
def federation():
    return inspect.unwrap(cases.federation)()


@pytest.fixture
def task(algorithm):
    return inspect.unwrap(cases.task)(algorithm)


@pytest.fixture
def grid():
    grid = MemoryGrid()
    with unhurried() as patch:
        patch.setattr(flower_app, "Coordinator", partial(Coordinator, clock=grid.clock, sleep=grid.sleep))
        yield grid


def learn_at_sites(grid, algorithm, task, federation, folder, rounds=3):
    for k in range(CLIENTS):
        app = client_app(algorithm, task, lambda node, k=k: federation.client(k))
        grid.start(app, site=federation.name(k), states=str(folder / "sites"))
    return serve(
        grid,
        algorithm,
        task,
        participation=Participation(CLIENTS),
        rounds=rounds,
        cohort=5,
        out=folder / "run",
        precision="float64",
        debug=True,
    )


def assert_same(what, found, wanted, but=()):
    for (name, x), (_, y) in zip(leaves(found), leaves(wanted), strict=True):
        if name not in but:
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{what} {n}: {m}")


@cases.every
def test_sites_give_the_simulators_run(algorithm, task, federation, grid, tmp_path):
    if len(algorithm.arrange(federation)) < CLIENTS:
        with pytest.raises(ConfigError, match="moves the data to one place"):
            learn_at_sites(grid, algorithm, task, federation, tmp_path)
        return
    there, here = learn_at_sites(grid, algorithm, task, federation, tmp_path), cases.learned(algorithm)
    assert_same("server", there.server, here.server)
    experiment = Registry.read(tmp_path / "run").experiment
    for k in range(CLIENTS):
        state, folder = (
            here.states.gather(torch.tensor([k])),
            ClientStorage(tmp_path / "sites", experiment, federation.name(k)),
        )
        if state is None or k not in here.states:
            assert not folder.tokens()
            continue
        assert_same(f"site {k}", folder.read(there.states.token(k))[0].state, state)
        if type(algorithm).follow is not cs.Algorithm.follow:  # the server knows what is on their disks
            private = ("network",) if getattr(algorithm, "own_network", False) else ()
            assert_same(f"mirror of {k}", there.states.gather(torch.tensor([k])), state, but=private)
