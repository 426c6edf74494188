"""Deployments: what a config may say, what `flower new` writes, and that both halves of it work together."""

from __future__ import annotations

import asyncio
import importlib
import io
import os
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import tomli_w
import torch
from flwr.app import Context, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

import consilience as cs
from consilience.config import LoadedDeployment, read_config, read_deployment
from consilience.core import records
from consilience.core.errors import ConfigError, DataError
from consilience.data.site import read_site
from consilience.flower import app as flower_app
from consilience.flower.client import FlowerClient
from consilience.flower.coordinator import Coordinator
from consilience.flower.deployment import deployment
from consilience.flower.deployment.create import write_app
from consilience.flower.deployment.gate import MAX_BYTES, gate_app, run_gate
from consilience.flower.messages import InfoRequest, SiteInfo, decode, encode
from support.flower_grid import MemoryGrid

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


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Forget users' files and the records in them, as another process would."""
    known, loaded = dict(records._types), set(sys.modules)

    def forget() -> None:
        monkeypatch.setattr(records, "_types", dict(known))
        for name in set(sys.modules) - loaded:
            if name.startswith("consilience_user_") or name.partition(".")[0].endswith("_app"):
                del sys.modules[name]

    forget()
    yield forget
    forget()


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """A deployment's config file with some sections changed; None takes one out."""

    def write(**sections: Any) -> Path:
        path = tmp_path / "config.toml"
        path.write_text(tomli_w.dumps({k: v for k, v in {**BASE, **sections}.items() if v is not None}))
        return path

    return write


def federation(**changes: Any) -> dict[str, Any]:
    return {"federation": {k: v for k, v in {**BASE["federation"], **changes}.items() if v is not None}}


# The config


def test_a_deployment_knows_its_network_and_method_without_any_data(config: Any) -> None:
    deployed = read_deployment(config(model={"name": "mlp", "hidden": [5]}))
    one, same, other = (deployed.task(seed) for seed in (1, 1, 2))
    assert one.size == 3 * 5 + 5 + 5 * 2 + 2
    assert torch.equal(one.initial(), same.initial())
    assert not torch.equal(one.initial(), other.initial())
    assert deployed.algorithm() == cs.FedAvg(cs.SGD(lr=0.1))
    assert deployed.config.run.checkpoint_every == 1
    participation = deployed.config.federation.model_dump(
        include={"min_clients", "timeout", "patience", "max_examples"}
    )
    assert participation == {"min_clients": 1, "timeout": 600.0, "patience": 3600.0, "max_examples": None}


def test_cropping_changes_what_the_model_is_built_for(config: Any) -> None:
    sections = {"task": {"augment": [{"name": "Crop", "size": 6}]}, **federation(inputs=[1, 8, 8])}
    assert read_deployment(config(**sections)).task(0).module[1].in_features == 36


@pytest.mark.parametrize(
    ("sections", "classes"),
    [
        ({}, ("well", "ill")),
        (federation(classes=None), ("0", "1")),
        ({"task": {"kind": "regression"}, **federation(classes=None)}, ()),
    ],
)
def test_classes_have_names_or_are_numbers_unless_there_are_none(config: Any, sections: Any, classes: Any) -> None:
    assert read_deployment(config(**sections)).classes == classes


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no federation": ({"federation": None}, "federation must be given"),
    "no clients": (federation(clients=None), "federation.clients must be given"),
    "no inputs": (federation(inputs=None), "federation.inputs must be given"),
    "misspelt": (federation(patince=3), "federation.patince: unknown key; did you mean 'patience'? allowed: classes"),
    "no time": (federation(timeout=0), "federation.timeout: input should be greater than 0, got 0"),
    "inputs": (federation(inputs=[0]), "federation.inputs.0: input should be greater than 0, got 0"),
    "few names": (federation(outputs=3), "federation.classes has 2 names, but federation.outputs is 3"),
    "one name twice": (federation(classes=["ill", "ill"]), "federation.classes has a name twice"),
    "a simulation": ({"data": {"name": "mnist"}}, "is the config of a simulation: `consilience flower new DIR "),
    "misspelt section": (
        {"sites": {}},
        "sites: unknown key; did you mean 'site'? allowed: algorithm, engine, federation",
    ),
    "engine": ({"engine": {"chunk": 3}}, "engine.chunk: unknown key; allowed: device, precision"),
    "precision": (
        {"engine": {"precision": "float46"}},
        "engine.precision: unknown name 'float46'; did you mean 'float",
    ),
    "run": ({"run": {"cohrt": 3}}, "run.cohrt: unknown key; did you mean 'cohort'? allowed: checkpoint_every, cohort"),
    "rounds": ({"run": {"rounds": 3}}, "run.rounds stands in pyproject.toml, under [tool.flwr.app.config]"),
    "seed": ({"run": {"seed": 3}}, "run.seed stands in pyproject.toml"),
    "out": ({"run": {"out": "here"}}, "run.out stands in pyproject.toml"),
    "a value for a section": ({"site": 3}, "site: a table was expected, got 3"),
    "a value for run": ({"run": 3}, "run: a table was expected, got 3"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_key_or_value_gets_one_sentence(config: Any, what: str) -> None:
    sections, sentence = WRONG[what]
    with pytest.raises(ConfigError) as caught:
        read_deployment(config(**sections))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"algorithm": {"name": "FedAvgg"}}, "algorithm.name: unknown name 'FedAvgg'; did you mean 'FedAvg'?"),
        (federation(min_clients=4), "min_clients is 4, but there are only 3 clients"),
    ],
)
def test_what_only_the_whole_tells_is_said_before_the_server_begins(config: Any, sections: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        deployment(config(**sections)).server_app()
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"out": "x"}, "rounds must be given"),
        ({"rounds": 3}, "out must be given"),
        ({"rounds": 0, "out": "x"}, "rounds: input should be greater than 0, got 0"),
        ({"rounds": 3, "out": "x", "sed": 1}, "sed: unknown key; did you mean 'seed'? allowed: out, rounds, seed"),
    ],
)
def test_a_wrong_run_config_gets_one_sentence(config: Any, table: Any, sentence: str) -> None:
    app = deployment(config()).server_app()
    with pytest.raises(ConfigError) as caught:
        app(MemoryGrid(), Context(1, 1, {}, RecordDict(), table))
    assert str(caught.value) == f"[tool.flwr.app.config] in pyproject.toml: {sentence}"


# flower new


def new(folder: Path, *overrides: str, config: Path = ROOT / "examples" / "silos.toml") -> Path:
    write_app(folder, read_config(config, [f"data.root={SILOS}", *overrides]))
    return folder


def simulated(deployed: Any, parts: dict[str, Any]) -> cs.runs.Run:
    """Two rounds of what an app holds, on the sites' own data, in one place."""
    return cs.fit(
        deployed.algorithm(),
        deployed.task(0),
        cs.Federation.from_silos({name: part.train for name, part in parts.items()}),
        rounds=2,
        engine=cs.Simulator(device="cpu", chunk=1, workers=1, precision="float64"),
        progress=False,
    )


def simulation(folder: Path, **sections: Any) -> Path:
    """A simulation's config beside files of the user's own."""
    (folder / "lib").mkdir()
    (folder / "own.py").write_text(OWN)
    (folder / "lib" / "own.py").write_text(OWN.replace("Cheer", "Other"))
    (folder / "lib" / "site_data.py").write_text(OWN.replace("Cheer", "Third"))
    base = {
        "data": {"name": "heart-disease"},
        "partition": {"name": "by_group", "group": "hospital"},
        "model": {"name": "logistic"},
        "run": {"rounds": 2},
    }
    path = folder / "simulation.toml"
    path.write_text(tomli_w.dumps({**base, **sections}))
    return path


def table(app: Path) -> dict[str, Any]:
    (path,) = app.glob("*_app/config.toml")
    return tomllib.loads(path.read_text())


def test_a_new_app_has_all_that_its_readme_names(tmp_path: Path) -> None:
    app = new(tmp_path / "Heart-2", "run.rounds=7", "run.seed=5")
    files = {str(path.relative_to(app)) for path in app.rglob("*") if path.is_file()}
    code = {f"heart_2_app/{name}" for name in ("__init__.py", "server_app.py", "client_app.py", "site_data.py")}
    scripts = {"superlink.sh", "gate.sh", "supernode.sh", "flwr.sh", "run.sh"}
    assert files == code | scripts | {"heart_2_app/config.toml", "pyproject.toml", "README.md", ".gitignore"}
    for script in scripts:
        assert os.access(app / script, os.X_OK)
        assert subprocess.run(["sh", "-n", app / script], capture_output=True).stderr == b""
    project = tomllib.loads((app / "pyproject.toml").read_text())
    assert project["project"]["name"] == "Heart-2"
    assert project["project"]["dependencies"] == [f"consilience[flower]=={cs.__version__}"]
    assert project["tool"]["flwr"]["app"]["config"] == {"rounds": 7, "seed": 5, "out": "runs/Heart-2"}
    assert "./supernode.sh --insecure" in (app / "README.md").read_text()


def test_sites_of_a_private_method_can_count_too(tmp_path: Path) -> None:
    app = new(tmp_path / "app", 'algorithm={name="Private", method={name="FedAvg", lr=0.3}}')
    project = tomllib.loads((app / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == [f"consilience[flower,privacy]=={cs.__version__}"]
    assert project["description"] == "Private(FedAvg) at 3 sites"


def test_tables_are_to_be_read_at_sites_as_in_the_simulation(tmp_path: Path) -> None:
    found = table(new(tmp_path / "app"))
    assert found["federation"] == {
        "name": "silos", "clients": 3, "min_clients": 1, "timeout": 600.0, "patience": 3600.0, "inputs": [3],
        "outputs": 2, "classes": ["0", "1"],
    }  # fmt: skip
    assert found["site"] == {
        "target": "target",
        "features": ["age", "pressure", "marker"],
        "scaling": tomllib.loads((SILOS / "scaling.toml").read_text()),
        "holdout": 0.25,
    }
    assert (found["run"], found["engine"]) == ({"checkpoint_every": 1}, {"precision": "float32", "device": "cpu"})
    simulated = cs.load("csv-silos", SILOS).train
    settings = {key: value for key, value in found["site"].items() if key != "holdout"}
    there = [read_site(SILOS / f"{site}.csv", classes=("0", "1"), **settings) for site in SITES]
    assert torch.equal(torch.cat([data.x for data in there]), simulated.x)
    assert torch.equal(torch.cat([data.y for data in there]), simulated.y)


def test_images_are_to_be_scaled_at_sites_as_in_the_simulation(tmp_path: Path) -> None:
    sections = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "clients": 10},
        "run": {"rounds": 2, "cohort": 4, "evaluate_every": 2},
        "engine": {"precision": "float64", "device": "cuda"},
    }
    write_app(tmp_path / "app", read_config(simulation(tmp_path, **sections)))
    found = table(tmp_path / "app")
    digits = cs.load("digits").train
    mean, std = found["site"]["mean"][0], found["site"]["std"][0]
    torch.testing.assert_close(
        (digits.x[:5].float() / 255 - mean) / std, digits.inputs(torch.arange(5)), rtol=1e-4, atol=1e-4
    )
    assert found["federation"]["inputs"] == [1, 8, 8]
    assert found["federation"]["min_clients"] == 2
    assert found["run"] == {"cohort": 4, "evaluate_every": 2, "checkpoint_every": 1}
    assert found["engine"]["precision"] == "float64"


def test_files_of_ones_own_go_along_under_names_that_clash_with_nothing(tmp_path: Path) -> None:
    algorithm = {
        "name": "Switch",
        "at": 1,
        "first": {"name": "own.py:Cheerful", "lr": 0.3},
        "then": {"name": "lib/own.py:Otherful", "mood": 5},
    }
    path = simulation(tmp_path, model={"name": "lib/site_data.py:Net", "width": 6}, algorithm=algorithm)
    write_app(tmp_path / "app", read_config(path))
    package = tmp_path / "app" / "app_app"
    assert (package / "own.py").read_text() == OWN
    assert (package / "own_2.py").read_text() == (tmp_path / "lib" / "own.py").read_text()
    assert (package / "site_data_2.py").read_text() == (tmp_path / "lib" / "site_data.py").read_text()
    found = table(tmp_path / "app")
    assert found["model"] == {"name": "site_data_2.py:Net", "width": 6}
    assert found["algorithm"]["first"] == {"name": "own.py:Cheerful", "lr": 0.3}
    assert found["algorithm"]["then"] == {"name": "own_2.py:Otherful", "mood": 5}


def test_every_config_of_the_examples_becomes_an_app_whose_method_is_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("silos", "fedep", "digits"):
        loaded = read_config(ROOT / "examples" / f"{name}.toml")
        write_app(tmp_path / name, loaded)
        deployed = read_deployment(tmp_path / name / f"{name}_app" / "config.toml")
        assert deployed.algorithm() == loaded.algorithm()
        assert torch.equal(deployed.task(0).initial(), loaded.setting(0).task.initial())


REFUSED: dict[str, tuple[str, list[str], str]] = {
    "a folder with something in it": ("full", [], "full exists already and is not empty: choose another directory"),
    "a file": ("simulation.toml", [], "cannot be the name of a Flower app"),
    "a name with a blank": ("my app", [], "'my app' cannot be the name of a Flower app: it must begin with a letter"),
    "a long name": ("a" * 33, [], "32 at most"),
    "a reference": ("app", ["algorithm.name=Pooled"], "Pooled is a reference that no real federation can run"),
    "a stream": ("app", ["partition.steps=2"], "partition.steps: streams are for simulations"),
    "data that are not there": (
        "app",
        ["data.name=fashion-mnist", "data.root=nowhere"],
        "the config's data are needed once, to see what an example looks like: fashion-mnist needs the file",
    ),
    "a wrong key": ("app", ["algorithm.lrr=1"], "algorithm.lrr: unknown key; did you mean 'lr'?"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_an_app_gets_a_sentence_and_nothing_is_written(
    tmp_path: Path, monkeypatch: Any, capsys: Any, what: str
) -> None:
    from consilience import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    simulation(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    directory, overrides, sentence = REFUSED[what]
    words = ["flower", "new", directory, "simulation.toml", *(w for o in overrides for w in ("--set", o))]
    monkeypatch.setattr(sys, "argv", ["consilience", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert after == before


def test_an_empty_folder_may_become_an_app_and_the_command_says_what_it_wrote(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    from consilience import cli

    monkeypatch.chdir(tmp_path)
    simulation(tmp_path)
    (tmp_path / "app").mkdir()
    monkeypatch.setattr(sys, "argv", ["consilience", "flower", "new", "app", "simulation.toml"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    assert "app/app_app/config.toml" in capsys.readouterr().err
    assert table(tmp_path / "app")["federation"]["clients"] == 4


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_flower_bundles_the_package_and_nothing_that_lies_beside_it(tmp_path: Path) -> None:
    app = new(tmp_path / "silos")
    for secret in ("runs/silos/run.json", "certificates/server.ext.toml", "states/x.json", "patients.json"):
        (app / secret).parent.mkdir(parents=True, exist_ok=True)
        (app / secret).write_text("{}")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as bundle:
        names = set(bundle.namelist())
        assert bundle.read("silos_app/config.toml") == (app / "silos_app" / "config.toml").read_bytes()
    code = {f"silos_app/{name}.py" for name in ("__init__", "server_app", "client_app", "site_data")}
    assert names == code | {"silos_app/config.toml", "pyproject.toml", ".info/CONTENT"}


# Both halves


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], tuple[Any, Any]]:
    """(server's app, site's app) of a folder, imported as Flower does."""

    def halves(app: Path) -> tuple[Any, Any]:
        monkeypatch.syspath_prepend(str(app))
        components = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["components"]
        found = []
        for half in ("serverapp", "clientapp"):
            module, _, name = components[half].partition(":")
            found.append(getattr(importlib.import_module(module), name))
        return found[0], found[1]

    return halves


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> MemoryGrid:
    grid = MemoryGrid()
    monkeypatch.setattr(flower_app, "Coordinator", partial(Coordinator, clock=grid.clock, sleep=grid.sleep))
    return grid


def context(**run_config: Any) -> Context:
    return Context(1, 1, {}, RecordDict(), run_config)


def test_both_halves_of_a_new_app_learn_what_a_simulation_does(tmp_path: Path, modules: Any, grid: MemoryGrid) -> None:
    app = new(tmp_path / "silos", 'algorithm={name="FedEP", lr=0.3}', "engine.precision=float64")
    server, site = modules(app)
    assert isinstance(server, ServerApp)
    assert isinstance(site, ClientApp)
    for name in SITES:
        grid.start(site, site=name, data=str(SILOS / f"{name}.csv"), states=str(tmp_path / "states"))
    out = tmp_path / "run"
    server(grid, context(rounds=1, out=str(out)))
    server(grid, context(rounds=2, out=str(out)))  # goes on
    assert (out / "report.html").exists()
    assert {file.parent.name.partition("-")[0] for file in (tmp_path / "states").rglob("*.safetensors")} == set(SITES)
    found = table(app)
    parts = {name: read_site(SILOS / f"{name}.csv", classes=("0", "1"), name=name, **found["site"]) for name in SITES}
    deployed = read_deployment(app / "silos_app" / "config.toml")
    run = simulated(deployed, parts)
    there = cs.load_posterior(out)
    torch.testing.assert_close(there.mean, run.posterior.mean, rtol=1e-10, atol=1e-10)
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    assert '"accuracy"' in (out / "evaluation.json").read_text()


def test_an_app_with_a_model_and_method_of_ones_own_runs(
    tmp_path: Path, forget: Any, modules: Any, grid: MemoryGrid
) -> None:
    algorithm = {"name": "own.py:Cheerful", "lr": 0.3}
    data = {"name": "csv-silos", "root": str(SILOS)}
    partition = {"name": "by_group", "group": "silo"}
    path = simulation(tmp_path, model={"name": "own.py:Net"}, algorithm=algorithm, data=data, partition=partition)
    write_app(tmp_path / "mine", read_config(path))
    forget()  # no site has ever seen the file at its old place
    server, site = modules(tmp_path / "mine")
    for name in SITES:
        grid.start(site, site=name, data=str(SILOS / f"{name}.csv"), states=str(tmp_path / "states"))
    server(grid, context(rounds=1, out=str(tmp_path / "run")))
    assert tomllib.loads((tmp_path / "mine" / "mine_app" / "config.toml").read_text())["model"]["name"] == "own.py:Net"
    assert '"clients": 3' in (tmp_path / "run" / "metrics.jsonl").read_text()


PLAYERS = ('model={name="mlp_gan", latent=2, hidden=[4]}', 'task={kind="adversarial", generators=2, pace=0.5}')


def test_a_gan_is_learned_at_sites_as_in_a_simulation(tmp_path: Path, modules: Any, grid: MemoryGrid) -> None:
    app = new(tmp_path / "silos", *PLAYERS, 'algorithm={name="SampledEPGAN"}', "engine.precision=float64")
    server, site = modules(app)
    for name in SITES:
        grid.start(site, site=name, data=str(SILOS / f"{name}.csv"), states=str(tmp_path / "states"))
    out = tmp_path / "run"
    server(grid, context(rounds=2, out=str(out)))
    deployed = read_deployment(app / "silos_app" / "config.toml")
    assert deployed.config.task.model_dump(exclude_none=True) == {
        "kind": "adversarial", "augment": [], "generators": 2, "pace": 0.5
    }  # fmt: skip
    site_settings = table(app)["site"]
    parts = {name: read_site(SILOS / f"{name}.csv", name=name, classes=("0", "1"), **site_settings) for name in SITES}
    run = simulated(deployed, parts)
    torch.testing.assert_close(cs.load_posterior(out).theta, run.posterior.theta, rtol=1e-10, atol=1e-10)
    assert '"recall"' in (out / "evaluation.json").read_text()


def test_a_gans_images_are_to_be_brought_to_the_same_range_at_sites(tmp_path: Path) -> None:
    path = simulation(
        tmp_path,
        data={"name": "digits"},
        partition={"name": "one_label", "clients": 10},
        model={"name": "dcgan", "width": 1, "latent": 2},
        task={"kind": "adversarial", "objective": "least-squares"},
        algorithm={"name": "FedGAN"},
    )
    write_app(tmp_path / "app", read_config(path))
    found = table(tmp_path / "app")
    assert found["task"] == {"kind": "adversarial", "objective": "least-squares"}
    (mean,), (std,) = found["site"]["mean"], found["site"]["std"]
    assert (0 / 255 - mean) / std == pytest.approx(-1, abs=1e-4)
    assert (16 / 255 - mean) / std == pytest.approx(1, abs=1e-4)  # digits have 17 shades
    deployed = read_deployment(tmp_path / "app" / "app_app" / "config.toml")
    assert deployed.classes == tuple("0123456789")  # which folders of images are called by


def test_a_gan_needs_no_classes_at_sites(config: Any) -> None:
    gan = {"task": {"kind": "adversarial"}, "model": {"name": "mlp_gan"}, **federation(classes=None)}
    assert read_deployment(config(**gan)).classes == ()


def test_the_seed_of_the_run_is_that_of_every_sites_network(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = []
    build = LoadedDeployment.task
    monkeypatch.setattr(LoadedDeployment, "task", lambda self, seed: seeds.append(seed) or build(self, seed))
    app = deployment(config(site={})).client_app(lambda: cs.Dataset(torch.ones(4, 3), torch.tensor([0, 1, 0, 1])))
    monkeypatch.chdir(tmp_path)
    MemoryGrid()  # there must be a task for messages to be of
    for _ in range(2):
        message = Message(encode(InfoRequest()), 7, "query")
        message.metadata.__dict__["_message_id"] = "1"
        reply = app(message, Context(1, 7, {"site": "basel"}, RecordDict(), {"seed": 3}))
        assert decode(reply.content, SiteInfo)[0].examples == 4
    assert seeds == [3]


# A site's data


def examples(app: Any, load: Any, **node: Any) -> Any:
    return app.examples(load, {"site": "basel", **node})


def loader(node: Any, classes: Any, name: Any, target: str = "target", holdout: float = 0.0) -> Any:
    return read_site(node["data"], classes=classes, name=name, target=target, holdout=holdout)


def test_a_loader_gets_its_node_the_classes_its_name_and_the_settings(config: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,c,ill\n" + "1,2,3,well\n4,5,6,ill\n" * 4)
    app = deployment(config(site={"target": "ill", "holdout": 0.5}))
    data = examples(app, loader, data=str(tmp_path / "a.csv"))
    assert (len(data.train), len(data.test), data.train.name, data.train.classes) == (4, 4, "basel", ("well", "ill"))


@pytest.mark.parametrize(
    ("site", "sentence"),
    [
        ({"targt": "x"}, "site.targt: unknown key; did you mean 'target'?"),
        ({"holdout": "much"}, "site.holdout: input should be a valid number"),
        ({"classes": ["x"]}, "site.classes: this is no setting, every loader is given it"),
    ],
)
def test_a_wrong_setting_of_sites_gets_one_sentence(config: Any, site: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        examples(deployment(config(site=site)), loader, data="x.csv")
    assert sentence in str(caught.value)


def test_a_node_without_data_is_told_how_to_start(config: Any) -> None:
    with pytest.raises(ConfigError, match="the node has no data: start it with --node-config"):
        examples(deployment(config()), loader)


def introduced(app: Any, load: Any, folder: Path, **node: Any) -> Any:
    """How a site with these data introduces itself."""
    method, task = app.deployed.algorithm(), app.deployed.task(0)
    return FlowerClient("north", method, task, lambda: app.examples(load, {"site": "north", **node}), folder).info()


def test_what_is_wrong_with_data_is_not_told_to_the_server(config: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,c,target\n1,2,Anna Muster,well\n")
    with pytest.raises(DataError) as caught:
        introduced(deployment(config()), loader, tmp_path, data=str(tmp_path / "a.csv"))
    assert str(caught.value) == "its data cannot be read; the log of its node says why"
    assert "Anna Muster" in str(caught.value.__cause__)

    def own() -> Any:
        raise KeyError("Anna Muster")

    with pytest.raises(DataError) as caught:
        introduced(deployment(config(site={})), own, tmp_path)
    assert "Anna" not in str(caught.value)


def test_data_of_another_shape_or_kind_are_refused(config: Any, tmp_path: Path) -> None:
    app = deployment(config(site={}))
    wide = cs.Dataset(torch.ones(2, 5), torch.tensor([0, 1]))
    fits = cs.Dataset(torch.ones(2, 3), torch.tensor([0, 1]))
    assert introduced(app, lambda: fits, tmp_path).x == ("float32", [3])
    for data in (wide, cs.Data(fits, wide)):
        with pytest.raises(ConfigError, match=r"of shape \(5,\) there, but federation.inputs .* is \(3,\)"):
            introduced(app, lambda data=data: data, tmp_path)
    with pytest.raises(DataError, match="its data cannot be read") as caught:
        introduced(app, lambda: 5, tmp_path)
    assert "must return a consilience.Dataset or Data, not int" in str(caught.value.__cause__)


# Without Flower


def test_all_but_deployments_works_without_flower(config: Any) -> None:
    path = config()
    code = (
        "import sys; sys.modules['flwr'] = None\n"
        "import consilience, consilience.cli\n"
        "from consilience.flower.deployment import deployment\n"
        f"app = deployment({str(path)!r})\n"
        "for half in (app.server_app, lambda: app.client_app(None)):\n"
        "    try: half()\n"
        "    except consilience.ConsilienceError as error: print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["real federations need Flower: pip install 'consilience[flower]'"] * 2


# The scripts

ECHO = """#!/bin/sh
echo "$(basename "$0")"
for word in "$@"; do echo "$word"; done
echo "FLWR_HOME=$FLWR_HOME telemetry=$FLWR_TELEMETRY_ENABLED no-update-check=$FLWR_DISABLE_UPDATE_CHECK"
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., list[str]]:
    """What a script of a new app would start: the program, its words, and what is said of its environment."""
    app, programs = new(tmp_path / "silos"), tmp_path / "bin"
    programs.mkdir()
    for name in ("flower-superlink", "flower-supernode", "flwr", "consilience"):
        (programs / name).write_text(ECHO)
        (programs / name).chmod(0o755)

    def run(name: str, *words: str, code: int = 0, **environment: str) -> list[str]:
        env = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path / "home"), **environment}
        ended = subprocess.run([app / name, *words], capture_output=True, text=True, env=env, cwd=tmp_path)
        assert ended.returncode == code, ended.stderr
        return (ended.stdout or ended.stderr).splitlines()

    return run


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_the_server_is_for_its_own_machine_and_has_certificates_and_keys_unless_told_otherwise(
    script: Any, tmp_path: Path
) -> None:
    words = script("superlink.sh", "--log-file", "x.log", LINK_PORT="8123")
    assert words[0] == "flower-superlink"
    assert (option(words, "--host"), option(words, "--port")) == ("127.0.0.1", "8123")
    assert "--disable-runtime-dependency-installation" in words
    assert "--enable-supernode-auth" in words
    assert option(words, "--ssl-certfile") == "certificates/server.crt"
    assert option(words, "--log-file") == "x.log"
    home = tmp_path / "silos" / ".flwr" / "server"
    assert words[-1] == f"FLWR_HOME={home} telemetry=0 no-update-check=1"
    words = script("superlink.sh", "--insecure")
    assert "--insecure" in words
    assert not {"--enable-supernode-auth", "--ssl-certfile"} & set(words)


def test_a_site_says_who_it_is_and_shows_its_key_unless_told_otherwise(script: Any, tmp_path: Path) -> None:
    words = script("supernode.sh", "St. Gallen", "data/x.csv", "--max-retries", "3", NODE_PORT="9001", DEVICE="cuda")
    app = tmp_path / "silos"
    assert words[0] == "flower-supernode"
    assert shlex.split(option(words, "--node-config")) == [
        "site=St. Gallen",
        f"data={tmp_path}/data/x.csv",
        f"states={app}/states",
        "device=cuda",
    ]
    assert (option(words, "--port"), option(words, "--superlink")) == ("9001", "localhost:8443")
    assert option(words, "--root-certificates") == f"{app}/certificates/ca.crt"
    assert option(words, "--auth-supernode-private-key") == f"{app}/keys/St. Gallen"
    assert option(words, "--max-retries") == "3"
    assert "--allow-runtime-dependency-installation" not in words
    assert words[-1] == f"FLWR_HOME={app}/.flwr/node-9001 telemetry=0 no-update-check=1"
    words = script("supernode.sh", "--insecure", "Chur", "/data", LINK="10.0.0.1:8000")
    assert "--insecure" in words
    assert not {"--root-certificates", "--auth-supernode-private-key"} & set(words)
    assert option(words, "--superlink") == "10.0.0.1:8000"
    assert "usage" in script("supernode.sh", "Chur", code=2)[0]
    assert "no quotes" in script("supernode.sh", 'Chur" x="1', "/data", code=2)[0]


@pytest.mark.parametrize("insecure", [[], ["--insecure"]])
def test_a_run_is_started_without_touching_anybodys_home(script: Any, tmp_path: Path, insecure: list[str]) -> None:
    words = script("run.sh", *insecure, "--run-config", "rounds=5", LINK_PORT="8123")
    app = tmp_path / "silos"
    assert words[:-1] == ["flwr", "run", str(app), "federation", "--stream", "--run-config", "rounds=5"]
    assert words[-1] == f"FLWR_HOME={app}/.flwr/command telemetry=0 no-update-check=1"
    link = tomllib.loads((app / ".flwr" / "command" / "config.toml").read_text())["superlink"]
    trust = {"insecure": True} if insecure else {"root-certificates": f"{app}/certificates/ca.crt"}
    assert link == {"default": "federation", "federation": {"address": "127.0.0.1:8123", **trust}}
    assert not (tmp_path / "home").exists()


def test_the_gate_is_what_others_reach(script: Any, tmp_path: Path) -> None:
    words = script("gate.sh", LINK_PORT="8123", GATE_PORT="9443")
    assert words[:3] == ["consilience", "flower", "gate"]
    assert (option(words, "--link"), option(words, "--port")) == ("127.0.0.1:8123", "9443")
    assert option(words, "--certificates") == str(tmp_path / "silos" / "certificates")


# The gate


def asked(path: str, content: bytes = b"x", method: str = "POST", **headers: str) -> tuple[httpx.Response, list[Any]]:
    """(what the gate answers, what reached the link)."""
    seen: list[Any] = []

    def link(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(401, content=b"answer", headers={"x-flower": "1"})

    async def ask() -> httpx.Response:
        app = gate_app("https://127.0.0.1:8000", transport=httpx.MockTransport(link))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="https://gate") as client:
            request = client.build_request(method, "/", content=content, headers=headers)
            request.url = request.url.copy_with(raw_path=path.encode())
            return await client.send(request)

    return asyncio.run(ask()), seen


def test_what_is_for_sites_goes_through_as_it_is() -> None:
    answer, seen = asked("/v1/fleet/pull-messages", b"\x00body", **{"flwr-signature": "s"})
    assert (answer.status_code, answer.content, answer.headers["x-flower"]) == (401, b"answer", "1")
    (request,) = seen
    assert str(request.url) == "https://127.0.0.1:8000/v1/fleet/pull-messages"
    assert (request.content, request.headers["flwr-signature"]) == (b"\x00body", "s")
    assert request.headers["host"] == "127.0.0.1:8000"


@pytest.mark.parametrize(
    "path",
    [
        "/", "/docs", "/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/v1/fleet/",
        "/v1/fleet/../control/start-run", "/v1/fleet/%2e%2e/control/start-run", "/v1/fleet/..%2fcontrol%2fstart-run",
        "//v1/fleet/get-run", "/v1/fleet/get-run/", "/V1/fleet/get-run", "/v1/fleet/get-run%0a",
    ],
)  # fmt: skip
def test_nothing_else_reaches_the_link(path: str) -> None:
    answer, seen = asked(path)
    assert (answer.status_code, seen) == (403, [])


def test_only_so_much_at_once_and_only_by_post() -> None:
    assert asked("/v1/fleet/push-object", b"0" * MAX_BYTES)[0].status_code == 401
    answer, seen = asked("/v1/fleet/push-object", b"0" * (MAX_BYTES + 1))
    assert (answer.status_code, seen) == (413, [])
    answer, seen = asked("/v1/fleet/get-run", method="GET")
    assert (answer.status_code, seen) == (405, [])


def test_a_link_that_is_down_is_no_error_of_the_gate() -> None:
    def down(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async def ask() -> httpx.Response:
        app = gate_app("https://127.0.0.1:8000", transport=httpx.MockTransport(down))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="https://gate") as client:
            return await client.post("/v1/fleet/get-run")

    assert asyncio.run(ask()).status_code == 503


def test_a_gate_without_certificates_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*ca\.crt: the gate needs the link's certificates"):
        run_gate("127.0.0.1:8000", "127.0.0.1", 8443, tmp_path)
