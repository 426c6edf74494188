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
        ["algorithm.then: ", "makes no such part; allowed: ADF, AsynchronousPVI, BayesADMM"],
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


UNFIT = {
    "a function of the standard library": ("data", "os:system"),
    "a class of the standard library": ("model", "subprocess:Popen"),
    "a built-in function": ("partition", "builtins:eval"),
    "a standard function that a file imports": ("model", "harmful.py:system"),
    "a part of one": ("model", "harmful.py:shell"),
    "a class of another kind": ("model", "own.py:Counting"),
    "a function with another result": ("partition", "harmful.py:split"),
    "a function without a result": ("data", "harmful.py:erase"),
    "another package's function in C": ("model", "torch:zeros"),
    "a class in place of a method": ("algorithm", "subprocess:Popen"),
    "a function in place of a part": ("algorithm", {"name": "FedAvg", "train": {"name": "os:system"}}),
    "a function in place of an objective": ("task", {"kind": "adversarial", "objective": "os:system"}),
    "a function in place of an augmentation": ("task", {"augment": [{"name": "os:system"}]}),
    "a function in place of a task": ("task", {"kind": "os:system"}),
}
HARMFUL = """
import functools, pathlib
from os import system
shell = functools.partial(system, "touch harmed")
def split(data) -> int: pathlib.Path("harmed").touch()
def erase(root: str = "") -> None: pathlib.Path("harmed").touch()
"""


@pytest.mark.parametrize(("section", "named"), UNFIT.values(), ids=UNFIT)
def test_what_cannot_make_the_part_is_refused_before_it_is_called(
    refusal: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, section: str, named: Any
) -> None:
    (folder / "harmful.py").write_text(HARMFUL)
    monkeypatch.chdir(tmp_path)
    table = dict(named) if isinstance(named, dict) else {"name": named}
    if named == "os:system":
        table["command"] = "touch harmed"
    own = {"data": {"name": "own.py:points"}, "partition": {"name": "own.py:halves"}}
    message = refusal(**own | {section: table} | ({"model": {"name": "mlp_gan"}} if "objective" in table else {}))
    assert "does not make a" in message
    assert not (tmp_path / "harmed").exists()


def test_a_function_with_a_wider_or_no_annotation_is_called(config: Any, folder: Path) -> None:
    (folder / "wide.py").write_text(
        "import functools\nfrom typing import Any\nfrom torch import nn\n"
        "def net(inputs, outputs) -> Any: return nn.Linear(2, 2)\n"
        "def base(inputs, outputs) -> object: return nn.Linear(2, 2)\n"
        "def union(inputs, outputs) -> 'nn.Module | None': return nn.Linear(2, 2)\n"
        "part = functools.partial(net, outputs=2)\nlinear = functools.partial(nn.Linear, 2, 2)\n"
    )
    for name in ("wide.py:net", "wide.py:base", "wide.py:union", "wide.py:part", "wide.py:linear"):
        config(data={"name": "own.py:points"}, partition={"name": "own.py:halves"}, model={"name": name}).setting()
