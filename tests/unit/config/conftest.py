"""A config beside a user's own files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from consilience.config import LoadedConfig, read_config
from consilience.core.errors import ConsilienceError

BASE: dict[str, Any] = {
    "data": {"name": "heart-disease"},
    "partition": {"name": "by_group", "group": "hospital"},
    "model": {"name": "logistic"},
    "run": {"rounds": 1},
    "engine": {"device": "cpu", "chunk": 4, "workers": 1},
}

OWN = '''
from typing import ClassVar

import torch
from torch import nn

import consilience as cs


@cs.record
class Tally:
    """A record of the user's own."""

    theta: torch.Tensor
    rounds: torch.Tensor


@cs.algorithm
class Counting(cs.Algorithm):
    """FedAvg that counts rounds."""

    train: cs.SGD = cs.SGD()
    start_at: int = 0

    def start(self, task, info):
        return Tally(info.initial, torch.tensor(self.start_at))

    def local(self, task, message, state, cohort):
        trained = self.train(task, message.theta, cohort)
        return cs.Weighted.of(cs.Point(trained - message.theta), cohort.n), None

    def fuse(self, server, update):
        return Tally(server.theta + update.mean.theta, server.rounds + 1)

    def posterior(self, server):
        return cs.Point(server.theta)


class FedAvg(cs.FedAvg):
    """The user's own of the same name."""


class Bare(cs.FedAvg):
    """Without the decorator."""

    mu: float = 0.1


class Endless(cs.Algorithm):
    """Without a start."""

    ranges: ClassVar = {}
    mu: float = 0.1

    def local(self, task, message, state, cohort):
        return message, None

    def fuse(self, server, update):
        return server

    def posterior(self, server):
        return cs.Point(server)


class Net(nn.Module):
    def __init__(self, inputs, outputs, width: int = 4):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(inputs[0], width), nn.Tanh(), nn.Linear(width, outputs))

    def forward(self, x):
        return self.layers(x)


def fixed():
    return nn.Linear(2, 2)


def failing(inputs, outputs):
    return {}["layers"]


def points(count: int = 30, top: int = 1, root: str = ""):
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0).long()
    y[0] = top
    return cs.Data(*(cs.Dataset(x, y, classes=("a", "b"), name="points") for _ in range(2)))


def halves(data, clients: int = 2):
    return cs.Federation.from_owner(data, torch.arange(len(data)) % 2, clients=clients)


def instancenorm(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs[0], 3), nn.InstanceNorm1d(3, track_running_stats=True), nn.Linear(3, outputs))


def players(inputs, latent: int = 3):
    return nn.Sequential(nn.Linear(latent, 4), nn.Linear(4, inputs[0])), nn.Sequential(nn.Linear(inputs[0], 1))


def pair(inputs, width: int = 4):
    return cs.models.Pair(*players(inputs, width), width)


def without_latent(inputs):
    return players(inputs)


class Hinge(cs.tasks.adversarial.Objective):
    def real(self, d):
        return (1 - d).relu()

    def fake(self, d):
        return (1 + d).relu()

    def generator(self, d):
        return -d


def pictures(top: int = 255, shades: int = 255):
    x = torch.arange(4 * 3 * 8 * 8).view(4, 3, 8, 8).remainder(shades + 1).to(torch.uint8)
    data = cs.Dataset(x, torch.arange(4), scale=torch.full((3, 1, 1), 1 / top), name="pictures")
    return cs.Data(data, data[:2])


constant = 5
'''

Write = Callable[..., LoadedConfig]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of a user's own, for configs."""
    folder = tmp_path_factory.mktemp("configs")
    (folder / "own.py").write_text(OWN)
    (folder / "broken.py").write_text("def :")
    (folder / "raising.py").write_text("\nnowhere\n")
    (folder / "random.py").write_text("from torch import nn\ndef net(): return nn.Linear(29, 2)\n")
    return folder


@pytest.fixture
def config(folder: Path) -> Write:
    """A config with the given sections in place of those of BASE, and overrides."""

    def write(*overrides: str, **sections: Any) -> LoadedConfig:
        path = folder / "config.toml"
        path.write_text(tomli_w.dumps({k: v for k, v in {**BASE, **sections}.items() if v is not None}))
        return read_config(path, list(overrides))

    return write


@pytest.fixture
def refusal(config: Write) -> Callable[..., str]:
    """The one line with which a config is refused when everything in it is built."""

    def build(*overrides: str, **sections: Any) -> None:
        loaded = config(*overrides, **sections)
        for make in (loaded.setting, loaded.algorithm, loaded.methods, loaded.engine, loaded.outside):
            make()

    def message(*overrides: str, **sections: Any) -> str:
        with pytest.raises(ConsilienceError) as caught:
            build(*overrides, **sections)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return message
