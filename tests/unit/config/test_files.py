"""Config files: sections, keys and overrides."""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

import consilience as cs
from consilience.config import read_config
from consilience.core.errors import ConfigError
from support.mutants import DEPLOYMENT, good, mutants, problem

REFUSED = {
    "runn.rounds=3": "runn: unknown key; did you mean 'run'? allowed: algorithm",
    "run.round=3": "run.round: unknown key; did you mean 'rounds'?",
    "task.nois=1": "task.nois: unknown key; did you mean 'noise'?",
    "run.rounds=0": "run.rounds must be at least 1, got 0",
    "run.rounds=ten": "run.rounds must be a whole number, got 'ten'",
    "run.rounds=1.5": "run.rounds must be a whole number, got 1.5",
    "run.cohort=-1": "run.cohort must be at least 1, got -1",
    "run.holdout=1": "run.holdout must be below 1, got 1",
    "run.seed=9223372036854775808": "run.seed must be below 9.22337e+18, got 9223372036854775808",
    "run.seed=[1]": "run.seed must be a whole number, got list(…)",
    "run=3": "run: a table was expected, got 3",
    "run={}": "run.rounds must be given",
    "data=mnist": "data: a table was expected, got 'mnist'",
    "data={}": "data.name must be given",
    "engine=fast": "engine: a table was expected, got 'fast'",
    "partition.steps=0": "partition.steps must be at least 1, got 0",
    "task.noise=0": "task.noise must be above 0, got 0",
    "task.generators=0": "task.generators must be at least 1, got 0",
    "data.name.x=3": "name is a value, not a table",
    "algorithm.lr": "--set algorithm.lr: write key=value, for example algorithm.lr=0.01",
    " =3": "--set  =3: write key=value, for example algorithm.lr=0.01",
}


@pytest.mark.parametrize("override", REFUSED)
def test_a_wrong_key_or_value_is_named(refusal: Any, override: str) -> None:
    assert REFUSED[override] in refusal(override)


def test_a_missing_section_is_named(refusal: Any) -> None:
    assert "run must be given" in refusal(run=None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("inf", math.inf),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('{name = "Adam", lr = 0.1}', {"name": "Adam", "lr": 0.1}),
        ('"quoted"', "quoted"),
        ("two words", "two words"),
        ("own.py:Net", "own.py:Net"),
        ("a=b", "a=b"),
        ("runs/x#1", "runs/x#1"),
        ("", ""),
    ],
)
def test_an_override_is_toml_or_else_a_string(config: Any, text: str, value: Any) -> None:
    assert config(f"model.extra={text}").config.model.arguments == {"extra": value}


def test_overrides_add_tables_and_the_last_one_wins(config: Any) -> None:
    loaded = config("algorithm.name=FedAvg", "algorithm.server.momentum=0.5", "algorithm.server.momentum=0.9")
    assert loaded.algorithm() == cs.FedAvg(server=cs.server.Momentum(momentum=0.9))


@pytest.mark.parametrize("content", [b"[run\nrounds = 1", b"\xff\xfe\x00", None])
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "config.toml" if content else tmp_path
    if content:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not valid TOML: " if content else "cannot be read: Is a dir") as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_the_example_config_is_valid() -> None:
    path = Path(__file__).parents[3] / "examples" / "mnist.toml"
    loaded = read_config(path)
    assert list(loaded.methods()) == ["FedAvg", "FedProx", "FedAdam", "LocalOnly", "Pooled"]
    assert loaded.algorithm() == cs.FedAvg(cs.SGD(lr=0.05, epochs=1, batch_size=20))
    assert tomllib.loads(path.read_text())["run"]["rounds"] == loaded.config.run.rounds


def test_damaged_configs_are_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/attacks.py has the campaign of ten thousand."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.toml"
    contents = [*(text.encode() for text in (*good(), DEPLOYMENT)), *mutants(25)]
    for number, content in enumerate(contents):
        path.write_bytes(content)
        assert (number, problem(path)) == (number, None)


@pytest.mark.parametrize("value", ["[" * 3000 + "]" * 3000, "[" * 20_000, "{a=" * 400 + "1" + "}" * 400])
def test_a_config_that_is_nested_deeply_is_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[engine]\ndeep = {value}\n")
    with pytest.raises(ConfigError, match="tables or lists in one another, more than 32 deep"):
        read_config(path)


def test_the_folder_of_data_is_a_string(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.root must be a string, got list"):
        config(data={"name": "csv-silos", "root": ["a"]}).setting()
