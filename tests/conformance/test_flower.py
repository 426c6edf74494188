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

CLIENTS = len(SIZES)
METHODS = [method for method in ENGINES if not isinstance(method, cs.Switch)]  # no federation of real sites switches


@pytest.fixture
def grid():
    grid = MemoryGrid()
    with unhurried() as patch:
        patch.setattr(flower_app, "Coordinator", partial(Coordinator, clock=grid.clock, sleep=grid.sleep))
        yield grid


def learn_at_sites(grid, method, folder):
    task, clients = task_of(method), federation()
    for k in range(CLIENTS):
        app = client_app(method, task, lambda node, k=k: clients.client(k))
        grid.start(app, site=clients.name(k), states=str(folder / "sites"))
    options = {"rounds": 3, "cohort": 4, "out": folder / "run", "precision": "float64", "debug": True}
    return serve(grid, method, task, participation=Participation(CLIENTS), **options)


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
