"""The user's own classes and functions in a config."""

from pathlib import Path
from typing import Any

import pytest

import consilience as cs
from consilience.runs.fit import fit

ALL_OWN: dict[str, Any] = {
    "data": {"name": "own.py:points", "count": 20},
    "partition": {"name": "own.py:halves"},
    "model": {"name": "own.py:Net", "width": 6},
    "algorithm": {"name": "own.py:Counting", "start_at": 10, "lr": 0.2},
}


def test_model_data_partition_and_algorithm_may_be_the_users_own(config: Any, tmp_path: Path) -> None:
    loaded = config(**ALL_OWN)
    algorithm, setting = loaded.algorithm(), loaded.setting()
    again = loaded.setting(1)  # as in a comparison: the file is not run a second time, so its records stay its records
    assert setting.federation.sizes.tolist() == [10, 10]
    assert setting.task.size == 2 * 6 + 6 + 6 * 2 + 2
    assert algorithm.train == cs.SGD(lr=0.2)
    for one in (setting, again):
        out = tmp_path / str(int(one is again))
        run = fit(algorithm, one.task, one.federation, rounds=2, engine=loaded.engine(), out=out, progress=False)
        assert int(run.server.rounds) == 12


def test_a_file_does_not_hide_a_module_of_its_name(config: Any) -> None:
    import random

    config(model={"name": "random.py:net"}).setting()
    import random as still

    assert still is random


def test_a_model_may_come_from_an_installed_package(config: Any) -> None:
    assert isinstance(config(model={"name": "consilience.models:logistic"}).setting().task, cs.Classification)


MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    ({"model": {"name": "nothere.py:Net"}}, ["model.name: 'nothere.py:Net' cannot be imported"]),
    ({"model": {"name": "no.such:Net"}}, ["model.name: 'no.such:Net' cannot be imported"]),
    ({"model": {"name": "own.py:Nett"}}, ["no class or function 'Nett'; did you mean 'Net'?"]),
    ({"model": {"name": "own.py:constant"}}, ["model.name: own.py has no class or function 'constant'"]),
    ({"model": {"name": ":Net"}}, ["model.name: ':Net' names no file: write file.py:Name"]),
    ({"model": {"name": "broken.py:Net"}}, ["cannot be imported: invalid syntax (broken.py, line 1)"]),
    (
        {"model": {"name": "raising.py:Net"}},
        ["'raising.py:Net' cannot be imported: NameError: name 'nowhere' is not defined (raising.py, line 2)"],
    ),
    ({"model": {"name": "own.py:failing"}}, ["model: failing failed with KeyError: 'layers' (own.py, line "]),
    ({"model": {"name": "own.py:points"}}, ["own.py:points must return a torch.nn.Module"]),
    ({"model": {"name": "own.py:Net", "widht": 3}}, ["model.widht: unknown key; did you mean 'w"]),
    ({"model": {"name": "own.py:Net", "width": "x"}}, ["model.width must be a whole number, got 'x'"]),
    ({"model": {"name": "own.py:instancenorm"}}, ["layer '1' (InstanceNorm1d)", "track_running_stats=False"]),
    ({"data": {"name": "own.py:fixed"}}, ["own.py:fixed must return consilience.Data(train, test)"]),
    (
        {"data": {"name": "own.py:points", "top": 7}, "partition": {"name": "own.py:halves"}},
        ["points: labels lie in 0..7, but classes has 2 names"],
    ),
    ({"partition": {"name": "own.py:fixed"}}, ["own.py:fixed must return a consilience.Federation"]),
    ({"algorithm": {"name": "own.py:fixed"}}, ["algorithm: ", "is not an Algorithm"]),
    (
        {"algorithm": {"name": "Switch", "at": 3, "then": "own.py:fixed"}},
        ["algorithm.then: ", "makes no such part; allowed: ADF, BayesGAN, Downpour"],
    ),
    ({"algorithm": {"name": "own.py:Endless"}}, ["Endless with abstract method"]),
    (
        {"algorithm": {"name": "own.py:Bare", "mu": 1.0}},
        ["algorithm.mu: unknown key; Bare has no argument mu yet: put @consilience.algorithm above the class"],
    ),
    (
        {"algorithm": {"name": "own.py:Endless", "nu": 1.0}},
        ["algorithm.nu: unknown key; Endless has no argument mu yet: put @consilience.algorithm above the class"],
    ),
]


@pytest.mark.parametrize(("sections", "parts"), MISTAKES)
def test_mistakes_in_the_users_own_files_are_named(refusal: Any, sections: Any, parts: list[str]) -> None:
    message = refusal(**sections)
    assert [part for part in parts if part not in message] == []
