"""Every example runs as a reader would run it, and says what it promises."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from consilience.config import read_config
from consilience.core.errors import DataError

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SAYS = {
    "active_learning.py": "mostly 0 and 1, mutual information",
    "one_shot.py": "Ensemble by class",
    "out_of_distribution.py": "upside down",
    "own_silos.py": "report.html",
    "speech.py": "understood",
    "survival.py": "survival after 2 years",
}


def test_no_script_is_forgotten():
    assert {file.name for file in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", sorted(SAYS))
def test_a_script_runs_in_an_empty_folder(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--quick"])
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert SAYS[name] in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(SAYS))
def test_a_script_fits_on_a_page(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 60


@pytest.mark.parametrize("config", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_a_config_means_something(config, monkeypatch):
    monkeypatch.chdir(ROOT)
    loaded = read_config(config)
    loaded.engine()
    assert loaded.algorithm()
    assert len(loaded.methods()) > 1
    try:
        setting = loaded.setting()
    except DataError as error:
        if "needs the file" not in str(error):
            raise
        pytest.skip(str(error))
    setting.task.check(setting.federation.data)
    assert len(setting.federation) > 1


def test_the_silos_differ_as_the_page_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    federation = read_config(EXAMPLES / "silos.toml").setting().federation
    assert federation.names == ("north", "south", "west")
    ill = [federation.client(silo).y.float().mean().item() for silo in range(3)]
    assert ill[0] > 2 * ill[2]
