"""Run directories: which files a run writes, in which order, and which it refuses to touch."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import consilience as cs
from consilience.core.errors import CallbackError, CheckpointError
from consilience.core.records import unpack
from consilience.runs import directory
from consilience.runs.directory import RunDirectory
from consilience.studies.compare import compare
from consilience.studies.setting import Setting
from support.runs import HERE, TRAIN, Power, assert_same, assert_same_run, checkpoints, cut, files, fit, read_lines
from support.scenarios import blobs, linear
from support.sealed import content


def test_metrics_on_disk_are_the_history(tmp_path: Path) -> None:
    task, train, test = blobs()
    run = fit(cs.FedAvg(TRAIN), task, train, test=test, out=tmp_path / "run", evaluate_every=2)
    assert read_lines(tmp_path / "run") == run.history
    assert content(tmp_path / "run" / "evaluation.json") == run.evaluate(test).to_json()


def test_run_json_says_what_was_run_on_what(tmp_path: Path) -> None:
    task, train, _ = blobs()
    run = fit(cs.FedProx(TRAIN, mu=0.3), task, train, out=tmp_path / "run", cohort=2, seed=7)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["algorithm"]["name"] == "FedProx"
    assert facts["algorithm"]["mu"] == 0.3
    assert facts["algorithm"]["train"]["lr"] == TRAIN.lr
    assert (facts["rounds"], facts["cohort"], facts["seed"]) == (4, 2, 7)
    assert facts["task"]["parameters"] == run.task.size
    assert facts["federation"]["sizes"] == train.sizes.tolist()
    assert torch.equal(torch.tensor(facts["federation"]["label_counts"]), train.label_counts())
    assert facts["plans"][0]["chunk"] == HERE.chunk


def test_two_checkpoints_are_kept(tmp_path: Path) -> None:
    task, federation = linear()
    fit(cs.FedAvg(TRAIN), task, federation, rounds=5, out=tmp_path / "run")
    assert [path.stem for path in checkpoints(tmp_path / "run")] == ["round-0000005", "round-0000004"]


def test_rounds_go_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is written only after round 2: a run that waited for it would never get there."""
    write, second = RunDirectory.save, threading.Event()

    def slowly(self: RunDirectory, round: int, *what: Any) -> None:
        assert second.wait(60)
        write(self, round, *what)

    def callback(run: cs.runs.Run, line: dict[str, Any]) -> None:
        if line["round"] == 2:
            second.set()

    monkeypatch.setattr(RunDirectory, "save", slowly)
    fit(cs.FedAvg(TRAIN), *linear(), out=tmp_path, callbacks=[callback])
    assert [path.stem for path in checkpoints(tmp_path)] == ["round-0000004", "round-0000003"]


def test_a_checkpoint_holds_the_server_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even of a method that changes its server in place, while the checkpoint waits to be written."""

    class InPlace(cs.FedAvg):
        def fuse(self, server: Any, update: Any) -> Any:
            new = super().fuse(server, update)
            server.model.theta.copy_(new.model.theta)
            return server

    write, third, seen = RunDirectory.save, threading.Event(), {}

    def slowly(self: RunDirectory, round: int, *what: Any) -> None:
        assert third.wait(60)
        write(self, round, *what)

    def callback(run: cs.runs.Run, line: dict[str, Any]) -> None:
        seen[line["round"]] = run.posterior.mean.clone()
        if line["round"] == 3:
            third.set()

    monkeypatch.setattr(RunDirectory, "save", slowly)
    fit(InPlace(TRAIN), *linear(), out=tmp_path, rounds=3, checkpoint_every=2, callbacks=[callback])
    assert not torch.equal(seen[2], seen[3])
    found = unpack(checkpoints(tmp_path)[1].read_bytes())
    assert torch.equal(found.server.model.theta, seen[2])


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: RunDirectory, *what: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(RunDirectory, "save", full)
    with pytest.raises(OSError, match="no space left"):
        fit(cs.FedAvg(TRAIN), *linear(), out=tmp_path)


@pytest.mark.parametrize(
    "name", ["posterior.safetensors", "round-0000003.safetensors", "2-3.safetensors", "metrics.csv", "evaluation.json"]
)
def test_a_full_disk_is_a_sentence_and_the_run_goes_on_when_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    task, federation = linear()
    options = {"test": federation, "state_memory": 0, "out": tmp_path / "run"}
    full, replace = threading.Event(), os.replace

    def refuse(beside: Path, path: Path) -> None:
        if full.is_set() and path.name == name:
            raise OSError(errno.ENOSPC, "No space left on device", str(beside), None, str(path))
        replace(beside, path)

    monkeypatch.setattr(os, "replace", refuse)
    filled = [lambda run, line: full.set() if line["round"] == 2 else None]
    with pytest.raises(CheckpointError, match=rf"{name} cannot be written \(No space left on device\): free some"):
        fit(cs.LocalOnly(TRAIN), task, federation, callbacks=filled, **options)
    assert not list(tmp_path.rglob("*.tmp"))
    full.clear()
    resumed = fit(cs.LocalOnly(TRAIN), task, federation, resume=True, **options)
    assert_same_run(resumed, fit(cs.LocalOnly(TRAIN), task, federation, test=federation))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_a_line_of_metrics_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    def fill(run: cs.runs.Run, line: dict[str, Any]) -> None:
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")

    with pytest.raises(CheckpointError, match=r"metrics\.jsonl cannot be written \(No space left on device\)"):
        fit(cs.FedAvg(TRAIN), *linear(), out=tmp_path, checkpoint_every=4, callbacks=[fill])


def test_an_error_about_a_file_elsewhere_is_not_one_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match="failed after round 1 with FileNotFoundError"):
        fit(cs.FedAvg(TRAIN), *linear(), out=tmp_path / "run", callbacks=[lambda *_: (tmp_path / "x").read_text()])


POSTERIORS = {
    "a point": (cs.FedAvg(TRAIN), cs.Point),
    "one precision": (cs.FedEP(cs.inference.Identity(TRAIN)), cs.Gaussian),
    "a diagonal": (cs.FedEP(cs.inference.Laplace(TRAIN)), cs.Gaussian),
    "full": (cs.FedEP(cs.inference.Newton(), prior=1.0), cs.Gaussian),
}


@pytest.mark.parametrize("what", POSTERIORS)
def test_a_posterior_is_loaded_from_the_run_and_from_a_copy_of_its_file(tmp_path: Path, what: str) -> None:
    task, federation = linear()
    algorithm, kind = POSTERIORS[what]
    run = fit(algorithm, task, federation, out=tmp_path / "run", checkpoint_every=3)
    (tmp_path / "copy").write_bytes((tmp_path / "run" / "posterior.safetensors").read_bytes())
    for path in (tmp_path / "run", str(tmp_path / "run"), tmp_path / "copy"):
        belief = cs.load_posterior(path)
        assert type(belief) is kind
        assert_same(belief, run.posterior)


def test_the_posterior_in_the_directory_is_the_last_checkpoints(tmp_path: Path) -> None:
    task, federation = linear()
    with pytest.raises(Power):
        fit(cs.FedAvg(TRAIN), task, federation, rounds=9, checkpoint_every=2, out=tmp_path / "run", callbacks=[cut(5)])
    assert_same(cs.load_posterior(tmp_path / "run"), fit(cs.FedAvg(TRAIN), task, federation, rounds=4).posterior)


def test_a_run_that_was_cut_between_its_last_posterior_and_checkpoint_is_whole_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, federation = linear()
    write = directory.write_atomically

    def one_file_and_no_more(path: Path, data: bytes | str, **how: Any) -> None:
        write(path, data, **how)
        if "safetensors" in path.name:
            raise Power

    monkeypatch.setattr(directory, "write_atomically", one_file_and_no_more)
    with pytest.raises(Power):
        fit(cs.FedAvg(TRAIN), task, federation, rounds=3, checkpoint_every=3, out=tmp_path / "run")
    monkeypatch.undo()
    run = fit(cs.FedAvg(TRAIN), task, federation, rounds=3, out=tmp_path / "run", resume=True)
    assert_same(cs.load_posterior(tmp_path / "run"), run.posterior)


def test_what_is_no_posterior_gets_a_sentence(tmp_path: Path) -> None:
    task, federation = linear()
    fit(cs.FedAvg(TRAIN), task, federation, out=tmp_path)
    file = tmp_path / "posterior.safetensors"
    with pytest.raises(CheckpointError, match="holds no posterior, but a Saved"):
        cs.load_posterior(checkpoints(tmp_path)[0])
    with pytest.raises(CheckpointError, match=r"run\.json holds no posterior: these bytes hold no record"):
        cs.load_posterior(tmp_path / "run.json")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"posterior\.safetensors holds no posterior: a damaged record"):
        cs.load_posterior(tmp_path)
    file.unlink()
    for place in (tmp_path, file, tmp_path / "elsewhere"):
        with pytest.raises(CheckpointError, match=r"there is no posterior at .*: No such file or directory"):
            cs.load_posterior(place)


@pytest.mark.parametrize("more", [0, 2])
def test_a_second_run_in_the_same_directory_is_refused_and_changes_nothing(tmp_path: Path, more: int) -> None:
    task, federation = linear()
    fit(cs.FedAvg(TRAIN), task, federation, test=federation, out=tmp_path / "run")
    before = files(tmp_path)
    with pytest.raises(CheckpointError, match="holds a run already: resume it, or choose another directory"):
        fit(cs.FedAvg(TRAIN), task, federation, test=federation, rounds=4 + more, out=tmp_path / "run")
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["config.toml", "metrics.jsonl", "posterior.safetensors", "checkpoints/round-1.safetensors"]
)
def test_a_directory_with_somebody_elses_files_is_refused_and_they_are_kept(tmp_path: Path, name: str) -> None:
    task, federation = linear()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / name).write_text("mine")
    before = files(tmp_path)
    with pytest.raises(CheckpointError, match=f"holds {name.split('/')[0]} but no run.json"):
        fit(cs.FedAvg(), task, federation, out=tmp_path)
    assert files(tmp_path) == before


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    task, federation = linear()
    (tmp_path / "run").write_text("mine")
    with pytest.raises(CheckpointError, match="cannot be made a run directory"):
        fit(cs.FedAvg(), task, federation, out=tmp_path / "run")
    assert (tmp_path / "run").read_text() == "mine"


def test_a_run_does_not_go_into_a_comparisons_directory(tmp_path: Path) -> None:
    task, federation = linear()
    compare(
        [cs.FedAvg(TRAIN)],
        Setting(task, federation, federation),
        seeds=1,
        out=tmp_path,
        rounds=1,
        engine=HERE,
        progress=False,
    )
    before = files(tmp_path)
    for resume in (False, True):
        with pytest.raises(CheckpointError, match="holds a comparison: choose another directory"):
            fit(cs.FedAvg(TRAIN), task, federation, out=tmp_path, resume=resume)
    assert files(tmp_path) == before
