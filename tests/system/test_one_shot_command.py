"""One-shot methods in configs and in the command."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import tomli_w

import consilience as cs
from consilience import cli
from consilience.config import read_config
from consilience.core.errors import ConfigError

OWN = """
import torch
import consilience as cs

def points():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    data = cs.Dataset(x, (x[:, 0] > 0).long(), classes=("a", "b"), name="points")
    return cs.Data(data, data)
"""
BASE = {
    "data": {"name": "own.py:points"},
    "partition": {"name": "iid", "clients": 2},
    "model": {"name": "mlp", "hidden": [4]},
    "algorithm": {"name": "PFNM", "epochs": 1},
    "run": {"rounds": 1},
    "engine": {"device": "cpu", "chunk": 2, "workers": 1},
}


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """The command in an empty folder but for own.py and config.toml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "config.toml").write_text(tomli_w.dumps(BASE))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["consilience", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        ended = capsys.readouterr()
        return SimpleNamespace(code=stop.value.code or 0, out=ended.out, err=ended.err)

    return run


def test_the_command_refuses_a_model_without_hidden_units_in_a_line(command, tmp_path):
    (tmp_path / "bad.toml").write_text(tomli_w.dumps(BASE | {"model": {"name": "logistic"}}))
    before = sorted(tmp_path.iterdir())
    ended = command("run", "bad.toml")
    assert ended.code == 2
    assert "it has no hidden units to match" in ended.err
    assert len(ended.err.strip().splitlines()) == 1
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize("name", ["PFNM", "Ensemble", "Downpour"])
def test_the_command_runs_and_lists_them(command, tmp_path, name):
    ended = command("run", "config.toml", "--set", f"algorithm.name={name}")
    assert ended.code == 0
    assert f"{name}, round 1" in ended.out
    assert (tmp_path / "runs" / "config" / "report.html").stat().st_size > 1000
    assert name in command("list", "algorithms").out


def test_configs_say_how_units_are_matched(tmp_path):
    def chosen(**algorithm):
        path = tmp_path / "config.toml"
        path.write_text(tomli_w.dumps(BASE | {"algorithm": {"name": "PFNM"} | algorithm}))
        return read_config(path).algorithm()

    usual = cs.PFNM().train
    assert chosen() == cs.PFNM()
    assert chosen(how={"name": "BetaBernoulli", "mass": 0.5}) == cs.PFNM(how=cs.matching.BetaBernoulli(mass=0.5))
    assert chosen(how={"mass": 0.5}, streaming=True).how == cs.matching.BetaBernoulli(mass=0.5)
    assert chosen(how="DPMeans") == cs.PFNM(how=cs.matching.DPMeans())
    assert chosen(lr=0.3, epochs=2).train == cs.optim.AMSGrad(
        lr=0.3, epochs=2, batch_size=usual.batch_size, weight_decay=usual.weight_decay
    )
    assert chosen(name="Ensemble", by_class=True, lr=0.3).train.lr == 0.3
    assert chosen(name="Downpour", server={"lr": 0.5}).server == cs.server.Adam(lr=0.5, eps=1e-8)
    with pytest.raises(ConfigError, match="mass must be above 0"):
        chosen(how={"mass": 0.0})
