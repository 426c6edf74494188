"""A resumed run is the uninterrupted run, bit for bit; another run is not resumed."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import consilience as cs
from consilience.core.errors import CheckpointError
from support.runs import (
    FORKED,
    HERE,
    TRAIN,
    Power,
    assert_same,
    assert_same_run,
    checkpoints,
    cut,
    files,
    fit,
    read_lines,
)
from support.scenarios import SIZES, linear
from support.sealed import content

RUNS: dict[str, tuple[cs.Algorithm, dict[str, Any]]] = {
    "FedAvg": (cs.FedAvg(TRAIN, server=cs.server.Momentum(momentum=0.9)), {"checkpoint_every": 3}),
    "FedAvg, Adam, a cohort of two": (cs.FedAvg(TRAIN, server=cs.server.Adam()), {"cohort": 2}),
    "mixed epochs": (cs.FedAvg(replace(TRAIN, epochs=3, mixed=True)), {"cohort": 2}),
    "LocalOnly in memory": (cs.LocalOnly(TRAIN), {"cohort": 3}),
    "LocalOnly on disk": (cs.LocalOnly(TRAIN), {"cohort": 3, "state_memory": 0, "checkpoint_every": 3}),
    "LocalOnly on disk, forked": (cs.LocalOnly(TRAIN), {"cohort": 3, "state_memory": 0, "engine": FORKED}),
}


@pytest.mark.parametrize("name", RUNS)
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path: Path, name: str) -> None:
    task, federation = linear()
    algorithm, options = RUNS[name]
    options = {"rounds": 6, "test": federation, **options}
    whole = fit(algorithm, task, federation, out=tmp_path / "whole", **options)
    for at in (1, 5):
        with pytest.raises(Power):
            fit(algorithm, task, federation, out=tmp_path / "parts", resume=True, callbacks=[cut(at)], **options)
    resumed = fit(algorithm, task, federation, out=tmp_path / "parts", resume=True, **options)
    assert_same_run(whole, resumed)
    assert read_lines(tmp_path / "parts") == resumed.history
    one, other = (cs.core.unpack(checkpoints(tmp_path / which)[0].read_bytes()) for which in ("whole", "parts"))
    assert_same(one, other)
    whole_scores, parts_scores = (content(tmp_path / w / "evaluation.json") for w in ("whole", "parts"))
    assert whole_scores == parts_scores


@pytest.mark.parametrize("batch_norm", ["estimated", "averaged", "FedBN"])
def test_a_resumed_run_has_the_batchnorm_statistics_of_the_uninterrupted_one(tmp_path: Path, batch_norm: str) -> None:
    torch.manual_seed(0)
    _, federation = linear()
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    own: dict[str, Any] = {} if batch_norm == "FedBN" else {"batch_norm": batch_norm}
    algorithm = cs.algorithms.FedBN(TRAIN) if batch_norm == "FedBN" else cs.FedAvg(TRAIN)
    task, options = cs.Regression(module, **own), {"rounds": 4, "cohort": 3, "test": federation}
    whole = fit(algorithm, task, federation, out=tmp_path / "whole", **options)
    with pytest.raises(Power):
        fit(algorithm, task, federation, out=tmp_path / "parts", callbacks=[cut(2)], **options)
    resumed = fit(algorithm, task, federation, out=tmp_path / "parts", resume=True, **options)
    assert_same_run(whole, resumed)
    assert (whole.statistics is None) == (batch_norm != "estimated")
    assert_same(whole.statistics, resumed.statistics)
    assert [line["eval"] for line in whole.history] == [line["eval"] for line in resumed.history]
    again = fit(algorithm, task, federation, out=tmp_path / "whole", resume=True, **options)
    assert_same(whole.statistics, again.statistics)


def test_states_on_disk_are_those_in_memory_and_old_files_go(tmp_path: Path) -> None:
    task, federation = linear()
    memory = fit(cs.LocalOnly(TRAIN), task, federation, rounds=6)
    disk = fit(cs.LocalOnly(TRAIN), task, federation, rounds=6, out=tmp_path / "run", state_memory=0)
    assert_same_run(memory, disk)
    names = {path.name for path in (tmp_path / "run" / "states").iterdir()}
    assert names == {f"{client}-{round}.safetensors" for client in range(len(SIZES)) for round in (5, 6)}


@pytest.mark.parametrize(("first", "then"), [(0, 1 << 20), (1 << 20, 0)])
def test_states_may_move_between_memory_and_files(tmp_path: Path, first: int, then: int) -> None:
    task, federation = linear()
    whole = fit(cs.LocalOnly(TRAIN), task, federation, rounds=6)
    fit(cs.LocalOnly(TRAIN), task, federation, out=tmp_path / "run", state_memory=first)
    out: dict[str, Any] = {"out": tmp_path / "run", "resume": True}
    resumed = fit(cs.LocalOnly(TRAIN), task, federation, rounds=5, state_memory=then, **out)
    resumed = fit(cs.LocalOnly(TRAIN), task, federation, rounds=6, state_memory=first, **out)
    assert_same_run(whole, resumed)


def test_a_state_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    task, federation = linear()
    fit(cs.LocalOnly(TRAIN), task, federation, out=tmp_path / "run", state_memory=0)
    (tmp_path / "run" / "states" / "3-4.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"state of client 3 cannot be read from .*3-4\.safetensors"):
        fit(cs.LocalOnly(TRAIN), task, federation, rounds=6, out=tmp_path / "run", resume=True, state_memory=0)


def test_a_finished_run_can_go_on_to_more_rounds(tmp_path: Path) -> None:
    task, federation = linear()
    whole = fit(cs.FedAvg(TRAIN), task, federation, rounds=7)
    fit(cs.FedAvg(TRAIN), task, federation, rounds=4, out=tmp_path / "run")
    assert_same_run(whole, fit(cs.FedAvg(TRAIN), task, federation, rounds=7, out=tmp_path / "run", resume=True))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["rounds"] == 7


def test_a_finished_run_that_is_resumed_is_read_and_not_run(tmp_path: Path) -> None:
    task, federation = linear()
    done = fit(cs.LocalOnly(TRAIN), task, federation, out=tmp_path / "run", test=federation)
    before = files(tmp_path)
    again = fit(
        cs.LocalOnly(TRAIN), task, federation, out=tmp_path / "run", test=federation, resume=True, callbacks=[cut(4)]
    )
    assert_same_run(done, again)
    assert again.history == done.history
    assert files(tmp_path) == before


def test_a_run_cannot_be_resumed_to_fewer_rounds_than_it_has_or_without_its_facts(tmp_path: Path) -> None:
    task, federation = linear()
    fit(cs.FedAvg(TRAIN), task, federation, rounds=4, out=tmp_path / "run")
    with pytest.raises(CheckpointError, match="is at round 4 already: rounds is only 3"):
        fit(cs.FedAvg(TRAIN), task, federation, rounds=3, out=tmp_path / "run", resume=True)
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run\.json is not valid JSON: .*: restore it from a backup"):
        fit(cs.FedAvg(TRAIN), task, federation, out=tmp_path / "run", resume=True)


def changed_weights(task: cs.Regression) -> cs.Regression:
    module = nn.Linear(3, 1)
    nn.init.ones_(module.weight)
    return cs.Regression(module)


def another_partition(federation: cs.Federation) -> cs.Federation:
    return replace(federation, order=federation.order.flip(0))


OTHERS: dict[str, tuple[str, Any]] = {
    "lr": (
        r"algorithm\.train\.lr is 0\.1 there and 0\.2 here",
        lambda a, t, f: (cs.FedAvg(replace(TRAIN, lr=0.2)), t, f, {}),
    ),
    "method": (r"algorithm\.name is 'FedAvg' there and 'FedProx' here", lambda a, t, f: (cs.FedProx(TRAIN), t, f, {})),
    "server": (
        r"algorithm\.server\.name is 'Momentum' there and 'Adam' here",
        lambda a, t, f: (cs.FedAvg(TRAIN, server=cs.server.Adam()), t, f, {}),
    ),
    "seed": (r"seed is 0 there and 1 here", lambda a, t, f: (a, t, f, {"seed": 1})),
    "cohort": (r"cohort is 5 there and 2 here", lambda a, t, f: (a, t, f, {"cohort": 2})),
    "partition": (r"federation\.partition is \d+ there and \d+ here", lambda a, t, f: (a, t, another_partition(f), {})),
    "module": (
        r"task\.module is 'Linear\(.*\)' there and 'Sequential\(",
        lambda a, t, f: (a, cs.Regression(nn.Sequential(nn.Linear(3, 1))), f, {}),
    ),
    "weights": (
        r"run whose module had other initial weights: call torch\.manual_seed\(…\) before you make the module",
        lambda a, t, f: (a, changed_weights(t), f, {}),
    ),
    "weights and more": (
        r"task\.weights is \d+ there and \d+ here; seed is 0 there",
        lambda a, t, f: (a, changed_weights(t), f, {"seed": 1}),
    ),
    "scale": (
        r"contents\.scale is None there and \d+ here",
        lambda a, t, f: (a, t, replace(f, data=replace(f.data, scale=torch.tensor(2.0))), {}),
    ),
    "shift": (
        r"contents\.shift is None there and \d+ here",
        lambda a, t, f: (a, t, replace(f, data=replace(f.data, shift=torch.tensor(2.0))), {}),
    ),
    "noise": (
        r"task\.noise is 1\.0 there and 0\.5 here",
        lambda a, t, f: (a, cs.Regression(t.module, noise=0.5), f, {}),
    ),
    "precision": (
        r"precision is 'float32' there and 'float64' here",
        lambda a, t, f: (a, t, f, {"engine": replace(HERE, precision="float64")}),
    ),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run."""
    out = tmp_path_factory.mktemp("stored") / "run"
    fit(cs.FedAvg(TRAIN), *linear(), rounds=2, out=out)
    return out


@pytest.mark.parametrize("what", OTHERS)
def test_another_run_is_not_resumed_and_the_difference_is_named(stored: Path, what: str) -> None:
    before, (sentence, change) = files(stored), OTHERS[what]
    algorithm, task, federation, options = change(cs.FedAvg(TRAIN), *linear())
    with pytest.raises(CheckpointError, match=sentence):
        fit(algorithm, task, federation, out=stored, resume=True, **options)
    assert files(stored) == before


class Fixed(nn.Module):
    """A layer and a number that are not learned, in bfloat16, which NumPy does not have."""

    def __init__(self, weight: float = 1.0, level: float = 1.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3, bias=False), nn.Linear(3, 1)
        for parameter, value in ((self.first.weight, weight), (self.last.weight, 0.0), (self.last.bias, 0.0)):
            nn.init.constant_(parameter, value)
        self.first.to(torch.bfloat16).requires_grad_(False)
        self.register_buffer("level", torch.tensor(level))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.level)


@pytest.mark.parametrize("change", [{"weight": 2.0}, {"level": 2.0}], ids=["frozen weights", "buffers"])
def test_what_of_the_module_is_not_learned_must_be_the_same(tmp_path: Path, change: dict[str, float]) -> None:
    _, federation = linear()
    fit(cs.FedAvg(TRAIN), cs.Regression(Fixed()), federation, out=tmp_path)
    again = {"rounds": 6, "out": tmp_path, "resume": True}
    with pytest.raises(CheckpointError, match=r"contents\.frozen is \d+ there and \d+ here"):
        fit(cs.FedAvg(TRAIN), cs.Regression(Fixed(**change)), federation, **again)
    fit(cs.FedAvg(TRAIN), cs.Regression(Fixed()), federation, **again)


def test_every_example_must_be_the_same(tmp_path: Path) -> None:
    task, federation = linear(sizes=(30, 30), names=None)
    fit(cs.FedAvg(TRAIN), task, federation, rounds=1, out=tmp_path)
    x = federation.data.x.clone()
    x[1] += 1
    other = replace(federation, data=replace(federation.data, x=x))
    with pytest.raises(CheckpointError, match=r"another run: contents\.inputs is \d+ there and \d+ here\."):
        fit(cs.FedAvg(TRAIN), task, other, rounds=2, out=tmp_path, resume=True)


def test_a_resumed_run_follows_the_plan_it_began_with(tmp_path: Path) -> None:
    task, federation = linear()
    fit(cs.FedAvg(TRAIN), task, federation, out=tmp_path / "run")
    other = cs.Simulator(device="cpu", chunk=2, workers=2)
    run = fit(cs.FedAvg(TRAIN), task, federation, rounds=6, out=tmp_path / "run", resume=True, engine=other)
    assert run.plan is not None
    assert (run.plan.chunk, run.plan.workers) == (4, 1)
    assert_same_run(run, fit(cs.FedAvg(TRAIN), task, federation, rounds=6))


@pytest.mark.parametrize(("name", "keep"), [("FedAvg", 0), ("LocalOnly in memory", 7), ("LocalOnly on disk", 100)])
def test_a_truncated_checkpoint_is_set_aside_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, keep: int
) -> None:
    task, federation = linear()
    algorithm, options = RUNS[name]
    whole = fit(algorithm, task, federation, rounds=7, out=tmp_path / "whole", **options)
    run = tmp_path / "run"
    fit(algorithm, task, federation, rounds=6, out=run, **options | {"checkpoint_every": 2})
    newest, before = checkpoints(run)
    newest.write_bytes(newest.read_bytes()[:keep])
    with caplog.at_level(logging.WARNING, "consilience"):
        resumed = fit(algorithm, task, federation, rounds=7, out=run, resume=True, **options)
    assert "round-0000006.safetensors cannot be read" in caplog.text
    assert "falling back to the one before" in caplog.text
    assert_same_run(whole, resumed)
    assert newest.with_suffix(".damaged").exists()
    assert before.stem == "round-0000004"


def test_with_all_checkpoints_damaged_a_run_is_not_silently_begun_again(tmp_path: Path) -> None:
    task, federation = linear()
    fit(cs.FedAvg(TRAIN), task, federation, out=tmp_path / "run")
    for path in checkpoints(tmp_path / "run"):
        path.write_bytes(path.read_bytes()[:-1])
    before = files(tmp_path)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .* can be read"):
            fit(cs.FedAvg(TRAIN), task, federation, out=tmp_path / "run", resume=True)
    assert files(tmp_path) == before


@pytest.mark.parametrize("folder", [True, False], ids=["the folder", "the files"])
def test_a_run_whose_checkpoints_are_gone_is_not_begun_again(tmp_path: Path, folder: bool) -> None:
    task, federation = linear()
    fit(cs.FedAvg(TRAIN), task, federation, test=federation, out=tmp_path / "run")
    for path in checkpoints(tmp_path / "run"):
        path.unlink()
    if folder:
        (tmp_path / "run" / "checkpoints").rmdir()
    before = files(tmp_path)
    with pytest.raises(CheckpointError, match=r"the checkpoints of .*run are gone: run it anew in another directory"):
        fit(cs.FedAvg(TRAIN), task, federation, rounds=6, test=federation, out=tmp_path / "run", resume=True)
    assert files(tmp_path) == before


def test_a_torn_last_line_of_metrics_is_dropped(tmp_path: Path) -> None:
    task, federation = linear()
    options = {"rounds": 6, "out": tmp_path / "run", "checkpoint_every": 2, "resume": True}
    with pytest.raises(Power):
        fit(cs.FedAvg(TRAIN), task, federation, callbacks=[cut(3)], **options)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"round": 4, "sec')
    run = fit(cs.FedAvg(TRAIN), task, federation, **options)
    assert [line["round"] for line in read_lines(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert_same_run(run, fit(cs.FedAvg(TRAIN), task, federation, rounds=6))
