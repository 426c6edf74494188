"""Small runs, and comparisons of two of them to the last bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import consilience as cs
from consilience.core.records import leaves
from support.sealed import lines

HERE = cs.Simulator(device="cpu", chunk=4, workers=1)
FORKED = cs.Simulator(device="cpu", chunk=4, workers=2)
TRAIN = cs.SGD(lr=0.1, momentum=0.5, batch_size=4)
STORED = ("checkpoint_every", "keep_checkpoints", "state_memory", "warm")
PARAMETERS = 4  # of scenarios.linear


def fit(algorithm: cs.Algorithm, task: cs.Task, federation: cs.Federation, **options: Any) -> cs.runs.Run:
    """Four rounds with a checkpoint each; options of `Storage` may be among those of `fit`."""
    options = {"rounds": 4, "engine": HERE, "progress": False, "checkpoint_every": 1, "out": None} | options
    stored = {name: options.pop(name) for name in STORED if name in options}
    return cs.fit(algorithm, task, federation, **options | {"out": cs.runs.Storage(options["out"], **stored)})


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in history]


def assert_same(one: Any, other: Any) -> None:
    pairs = list(zip(leaves(one), leaves(other), strict=True))
    assert all(name == same and torch.equal(x, y) for (name, x), (same, y) in pairs)


def assert_same_run(a: cs.runs.Run, b: cs.runs.Run) -> None:
    """Equal in every bit: the server, all client states, the history but for the clock."""
    ids = torch.arange(len(a.federation))
    assert_same(a.server, b.server)
    assert_same(a.states.gather(ids), b.states.gather(ids))
    assert timeless(a.history) == timeless(b.history)


class Power(BaseException):
    """Goes off."""


def cut(at: int) -> Callable[[cs.runs.Run, dict[str, Any]], None]:
    """A callback that ends the run after round `at`, before that round's checkpoint."""

    def callback(run: cs.runs.Run, line: dict[str, Any]) -> None:
        if line["round"] == at:
            raise Power

    return callback


def files(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def read_lines(directory: Path) -> list[dict[str, Any]]:
    return lines(directory)


def checkpoints(directory: Path) -> list[Path]:
    """Newest first."""
    return sorted((directory / "checkpoints").glob("*.safetensors"), reverse=True)
