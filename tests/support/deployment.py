"""Config files of deployments and of the simulations from which apps are made."""

import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from consilience.config import read_config
from consilience.core import records
from consilience.flower.deployment.create import write_app

ROOT = Path(__file__).parents[2]
SILOS = ROOT / "examples" / "silos"
SITES = ("north", "south", "west")

BASE: dict[str, Any] = {
    "federation": {"clients": 3, "inputs": [3], "outputs": 2, "classes": ["well", "ill"]},
    "model": {"name": "logistic"},
    "algorithm": {"name": "FedAvg", "lr": 0.1},
    "site": {"holdout": 0.25},
}

OWN = """
import torch
from torch import nn
import consilience as cs

class Net(nn.Module):
    def __init__(self, inputs, outputs, width: int = 4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs[0], width), nn.Tanh(), nn.Linear(width, outputs))
    def forward(self, x):
        return self.layers(x)

@cs.record
class Cheer:
    theta: torch.Tensor

@cs.algorithm
class Cheerful(cs.FedAvg):
    mood: int = 3
    def message(self, server, ids):
        return Cheer(super().message(server, ids).theta)
"""


def deployment_config(folder, **sections):
    """The path of a deployment's config with some sections changed; None removes one."""
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps({k: v for k, v in {**BASE, **sections}.items() if v is not None}))
    return path


def federation(**changes):
    """The section [federation] with some keys changed; None removes one."""
    return {"federation": {k: v for k, v in {**BASE["federation"], **changes}.items() if v is not None}}


def simulation_config(folder, **sections):
    """The path of a simulation's config, beside files of the user's own."""
    (folder / "lib").mkdir()
    (folder / "own.py").write_text(OWN)
    (folder / "lib" / "own.py").write_text(OWN.replace("Cheer", "Other"))
    (folder / "lib" / "site_data.py").write_text(OWN.replace("Cheer", "Third"))
    base = {
        "data": {"name": "csv-silos", "root": str(SILOS)},
        "partition": {"name": "by_group", "group": "silo"},
        "model": {"name": "logistic"},
        "run": {"rounds": 2},
    }
    path = folder / "simulation.toml"
    path.write_text(tomli_w.dumps({**base, **sections}))
    return path


def new_app(folder, *overrides):
    """The folder of a new app for the silos of the examples."""
    write_app(folder, read_config(ROOT / "examples" / "silos.toml", [f"data.root={SILOS}", *overrides]))
    return folder


def config_table(app):
    """The config of a new app."""
    (path,) = app.glob("*_app/config.toml")
    return tomllib.loads(path.read_text())


@contextmanager
def own_files_forgotten():
    """Yields a function that forgets users' files and the records in them, as a new process would."""
    known, loaded = dict(records._types), set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:

        def forget():
            patch.setattr(records, "_types", dict(known))
            for name in set(sys.modules) - loaded:
                if name.startswith("consilience_user_") or name.partition(".")[0].endswith("_app"):
                    del sys.modules[name]

        forget()  # later types go to a copy, which the end of the context drops
        yield forget
        forget()
