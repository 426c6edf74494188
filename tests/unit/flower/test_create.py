"""`flower new` writes an app with the simulation's model, method and reading of data."""

import io
import os
import tomllib
import zipfile

import pytest
import torch
from flwr.cli.build import build_fab_from_disk

import consilience as cs
from consilience.config import read_config, read_deployment
from consilience.core.errors import ConsilienceError
from consilience.data.site import read_site
from consilience.data.tables import agree
from consilience.flower.deployment.create import write_app
from support.deployment import OWN, ROOT, SILOS, SITES, config_table, new_app, own_files_forgotten, simulation_config


def test_a_new_app_has_the_files_that_its_readme_names(tmp_path):
    app = new_app(tmp_path / "Heart-2", "run.rounds=7", "run.seed=5")
    files = {str(path.relative_to(app)) for path in app.rglob("*") if path.is_file()}
    code = {f"heart_2_app/{name}" for name in ("__init__.py", "server_app.py", "client_app.py", "site_data.py")}
    scripts = {"superlink.sh", "gate.sh", "register.sh", "supernode.sh", "flwr.sh", "run.sh"}
    others = {"heart_2_app/config.toml", "pyproject.toml", "policy.toml", "README.md", ".gitignore"}
    assert files == code | scripts | others
    assert all(os.access(app / script, os.X_OK) for script in scripts)
    project = tomllib.loads((app / "pyproject.toml").read_text())
    assert project["project"]["name"] == "Heart-2"
    assert project["project"]["dependencies"] == [f"consilience[flower]=={cs.__version__}"]
    assert project["tool"]["flwr"]["app"]["config"] == {"rounds": 7, "seed": 5, "out": "runs/Heart-2"}
    assert "./supernode.sh --insecure" in (app / "README.md").read_text()


def test_sites_of_a_private_method_need_the_extra_for_privacy(tmp_path):
    app = new_app(tmp_path / "app", 'algorithm={name="Private", method={name="FedAvg", lr=0.3}}')
    project = tomllib.loads((app / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == [f"consilience[flower,privacy]=={cs.__version__}"]
    assert project["description"] == "Private(FedAvg) at 3 sites"


def test_sites_read_tables_as_the_simulation_does(tmp_path):
    found = config_table(new_app(tmp_path / "app"))
    assert found["federation"] == {
        "name": "silos", "clients": 3, "min_clients": 1, "timeout": 600.0, "patience": 3600.0, "outputs": 2,
        "classes": ["0", "1"],
    }  # fmt: skip
    assert found["site"] == {
        "target": "target",
        "features": ["age", "sex", "pressure", "marker", "smoking", "bmi"],
        "categorical": ["sex", "smoking"],
        "holdout": 0.25,
    }
    assert (found["run"], found["engine"]) == ({"checkpoint_every": 1}, {"precision": "float32", "device": "cpu"})
    simulated = cs.load("csv-silos", SILOS).train
    settings = {key: value for key, value in found["site"].items() if key != "holdout"}
    sites = {site: read_site(SILOS / f"{site}.csv", classes=("0", "1"), **settings) for site in SITES}
    made = agree({site: tables.summary() for site, tables in sites.items()}).preparation
    assert made.columns == simulated.preparation.columns
    there = [tables.prepared(made) for tables in sites.values()]
    assert torch.equal(torch.cat([data.x for data in there]), simulated.x)
    assert torch.equal(torch.cat([data.y for data in there]), simulated.y)


def test_sites_scale_images_as_the_simulation_does(tmp_path):
    sections = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "clients": 10},
        "run": {"rounds": 2, "cohort": 4, "evaluate_every": 2},
        "engine": {"precision": "float64", "device": "cuda"},
    }
    write_app(tmp_path / "app", read_config(simulation_config(tmp_path, **sections)))
    found = config_table(tmp_path / "app")
    digits = cs.load("digits").train
    mean, std = found["site"]["mean"][0], found["site"]["std"][0]
    assert torch.allclose((digits.x[:5].float() / 255 - mean) / std, digits.inputs(torch.arange(5)), atol=1e-4)
    assert found["federation"]["inputs"] == [1, 8, 8]
    assert found["federation"]["min_clients"] == 2
    assert found["run"] == {"cohort": 4, "evaluate_every": 2, "checkpoint_every": 1}
    assert found["engine"]["precision"] == "float64"


def test_sites_of_a_gan_bring_images_to_the_range_of_the_simulation(tmp_path):
    sections = {
        "data": {"name": "digits"},
        "partition": {"name": "one_label", "clients": 10},
        "model": {"name": "dcgan", "width": 1, "latent": 2},
        "task": {"kind": "adversarial", "objective": "least-squares"},
        "algorithm": {"name": "FedGAN"},
    }
    write_app(tmp_path / "app", read_config(simulation_config(tmp_path, **sections)))
    found = config_table(tmp_path / "app")
    assert found["task"] == {"kind": "adversarial", "objective": "least-squares"}
    (mean,), (std,) = found["site"]["mean"], found["site"]["std"]
    assert (0 / 255 - mean) / std == pytest.approx(-1, abs=1e-4)
    assert (16 / 255 - mean) / std == pytest.approx(1, abs=1e-4)  # digits have 17 shades
    deployed = read_deployment(tmp_path / "app" / "app_app" / "config.toml")
    assert deployed.classes == tuple("0123456789")  # the names of the folders of images


def test_the_users_own_files_are_copied_under_names_that_do_not_clash(tmp_path):
    algorithm = {
        "name": "Switch",
        "at": 1,
        "first": {"name": "own.py:Cheerful", "lr": 0.3},
        "then": {"name": "lib/own.py:Otherful", "mood": 5},
    }
    model = {"name": "lib/site_data.py:Net", "width": 6}
    with own_files_forgotten():
        write_app(tmp_path / "app", read_config(simulation_config(tmp_path, model=model, algorithm=algorithm)))
    package = tmp_path / "app" / "app_app"
    assert (package / "own.py").read_text() == OWN
    assert (package / "own_2.py").read_text() == (tmp_path / "lib" / "own.py").read_text()
    assert (package / "site_data_2.py").read_text() == (tmp_path / "lib" / "site_data.py").read_text()
    found = config_table(tmp_path / "app")
    assert found["model"] == {"name": "site_data_2.py:Net", "width": 6}
    assert found["algorithm"]["first"] == {"name": "own.py:Cheerful", "lr": 0.3}
    assert found["algorithm"]["then"] == {"name": "own_2.py:Otherful", "mood": 5}


@pytest.mark.parametrize("name", ["silos", "fedep", "digits"])
def test_the_apps_of_the_examples_have_the_same_method_and_weights(tmp_path, monkeypatch, name):
    monkeypatch.chdir(ROOT)
    loaded = read_config(ROOT / "examples" / f"{name}.toml")
    write_app(tmp_path / name, loaded)
    deployed = read_deployment(tmp_path / name / f"{name}_app" / "config.toml")
    assert deployed.algorithm() == loaded.algorithm()
    setting = loaded.setting(0)
    there = deployed.task(0, setting.federation.data.preparation)
    assert torch.equal(there.initial(), setting.task.initial())


REFUSED = {
    "a folder with files": ("full", [], "full exists already and is not empty: choose another directory"),
    "a file": ("simulation.toml", [], "cannot be the name of a Flower app"),
    "a name with a blank": ("my app", [], "'my app' cannot be the name of a Flower app: it must begin with a letter"),
    "a long name": ("a" * 33, [], "32 at most"),
    "pooled data": ("app", ["algorithm.name=Pooled"], "Pooled moves the data to one place"),
    "a stream": ("app", ["partition.steps=2"], "partition.steps: only simulations have streams"),
    "missing data": (
        "app",
        ["data={name='fashion-mnist', root='nowhere'}"],
        "a new app needs the config's data once, for the shape of an example: fashion-mnist needs the file",
    ),
    "a wrong key": ("app", ["algorithm.lrr=1"], "algorithm.lrr: unknown key; did you mean 'lr'?"),
}


@pytest.mark.parametrize(("directory", "overrides", "sentence"), REFUSED.values(), ids=REFUSED)
def test_an_impossible_app_gets_a_sentence_and_nothing_is_written(tmp_path, directory, overrides, sentence):
    config = simulation_config(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConsilienceError) as caught:
        write_app(tmp_path / directory, read_config(config, overrides))
    assert sentence in str(caught.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_flower_bundles_the_package_and_no_file_beside_it(tmp_path):
    app = new_app(tmp_path / "silos")
    for secret in ("runs/silos/run.json", "certificates/server.ext.toml", "states/x.json", "patients.json"):
        (app / secret).parent.mkdir(parents=True, exist_ok=True)
        (app / secret).write_text("{}")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as bundle:
        names = set(bundle.namelist())
        assert bundle.read("silos_app/config.toml") == (app / "silos_app" / "config.toml").read_bytes()
    code = {f"silos_app/{name}.py" for name in ("__init__", "server_app", "client_app", "site_data")}
    assert names == code | {"silos_app/config.toml", "pyproject.toml", ".info/CONTENT"}
