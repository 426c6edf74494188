"""Methods as a real federation: Flower's client app, called in memory, computes the simulator's run."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import consilience as cs
from consilience.core.errors import ConfigError
from consilience.flower import Participation, client_app, serve
from consilience.flower import app as flower_app
from consilience.flower.coordinator import Coordinator
from consilience.flower.registry import Registry
from consilience.flower.storage import ClientStorage
from support.flower_grid import MemoryGrid, unhurried
from support.methods import ENGINES, SIZES, assert_close, cases, federation, learned, overrides, task_of
from support.secure_sums import proofs

CLIENTS = len(SIZES)
METHODS = [method for method in ENGINES if not isinstance(method, cs.Switch)]  # no federation of real sites switches


@pytest.fixture
def grid():
    grid = MemoryGrid()
    with unhurried() as patch:
        patch.setattr(flower_app, "Coordinator", partial(Coordinator, clock=grid.clock, sleep=grid.sleep))
        yield grid


def learn_at_sites(grid, method, folder, secure=False):
    task, clients = task_of(method), federation()
    for k in range(CLIENTS):
        app, name = client_app(method, task, lambda node, k=k: clients.client(k)), clients.name(k)
        grid.start(app, site=name, states=str(folder / "sites"), **(proofs(name) if secure else {}))
    options = {"rounds": 3, "cohort": 4, "out": folder / "run", "precision": "float64"}
    how = {"secure": True} if secure else {"debug": True}
    return serve(grid, method, task, participation=Participation(CLIENTS), **options, **how)


@cases(METHODS)
def test_sites_compute_the_simulators_run(method, grid, tmp_path):
    if len(method.arrange(federation())) < CLIENTS:
        with pytest.raises(ConfigError, match="moves the data to one place"):
            learn_at_sites(grid, method, tmp_path)
        return
    there, here = learn_at_sites(grid, method, tmp_path), learned(method)
    assert_close(there.server, here.server, what="server")
    experiment = Registry.read(tmp_path / "run").experiment
    for k in range(CLIENTS):
        state = here.states.gather(torch.tensor([k]))
        folder = ClientStorage(tmp_path / "sites", experiment, federation().name(k))
        if state is None or k not in here.states:
            assert not folder.tokens()
            continue
        assert_close(folder.read(there.states.token(k))[0].state, state, what=f"site {k}")
        if overrides(method, "follow"):  # the server has a copy
            assert_close(there.states.gather(torch.tensor([k])), state, what=f"copy of {k}")


@cases([method for method in METHODS if len(method.arrange(federation())) == CLIENTS])
def test_sites_compute_the_simulators_run_under_secure_sums_too(method, grid, tmp_path):
    """The integers of the sums have errors below 1e-9, which a few rounds may multiply."""
    if not method.additive:
        with pytest.raises(ConfigError, match="needs the clients' updates one by one, which secure sums hide"):
            learn_at_sites(grid, method, tmp_path, secure=True)
        return
    there, here = learn_at_sites(grid, method, tmp_path, secure=True), learned(method)
    assert_close(there.server, here.server, 1e-5, what="server")
