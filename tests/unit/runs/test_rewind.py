"""More checkpoints are kept, and a run goes back to one of them."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import consilience as cs
from consilience.cli import app
from consilience.core import records
from consilience.core.errors import CheckpointError, ConfigError
from consilience.runs.directory import RunDirectory
from support.runs import TRAIN, assert_same, assert_same_run, checkpoints, fit, read_lines
from support.scenarios import linear

FEDEP = cs.FedEP(cs.inference.Identity(TRAIN))
SCAFFOLD = cs.SCAFFOLD(cs.SGD(lr=0.1, batch_size=4))
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FedAvg, Adam": (cs.FedAvg(TRAIN, server=cs.server.Adam()), {}),
    "FedEP in memory": (FEDEP, {"cohort": 3}),
    "FedEP on disk": (FEDEP, {"cohort": 3, "state_memory": 0}),
    "LocalOnly on disk, with room": (cs.LocalOnly(TRAIN), {"cohort": 2, "state_memory": 90}),
    "a switch": (cs.Switch(cs.FedAvg(TRAIN), FEDEP, at=4), {"state_memory": 0}),
    "a switch between states on disk": (cs.Switch(SCAFFOLD, FEDEP, at=4), {"cohort": 3, "state_memory": 0}),
}


def learn(name: str, out: Path | None, rounds: int, **options: Any) -> cs.runs.Run:
    algorithm, own = RUNS[name]
    task, federation = linear()
    own = own if out is not None else {key: value for key, value in own.items() if key != "state_memory"}
    return fit(algorithm, task, federation, rounds=rounds, test=federation, out=out, **own, **options)


def kept(run: Path) -> list[int]:
    return [int(path.stem.removeprefix("round-")) for path in reversed(checkpoints(run))]


@pytest.mark.parametrize("keep", [2, 3, 5])
def test_as_many_checkpoints_are_kept_as_asked_for(tmp_path: Path, keep: int) -> None:
    learn("FedAvg, Adam", tmp_path, 7, keep_checkpoints=keep)
    assert kept(tmp_path) == list(range(8 - keep, 8))


def test_there_is_always_one_in_reserve(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_checkpoints must be at least 2, got 1"):
        learn("FedAvg, Adam", tmp_path, 7, keep_checkpoints=1)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_went_back_and_is_resumed_is_the_uninterrupted_run(tmp_path: Path, name: str) -> None:
    whole, later, run = learn(name, None, 8), learn(name, None, 9), tmp_path / "run"
    learn(name, run, 8, keep_checkpoints=6)
    for back in (6, 3):
        RunDirectory(run).rewind(back)
        assert kept(run) == list(range(3, back + 1))
        assert [line["round"] for line in read_lines(run)] == list(range(1, back + 1))
        assert len((run / "metrics.csv").read_text().splitlines()) == 1 + back
        assert not {"evaluation.json", "posterior.safetensors"} & {path.name for path in run.iterdir()}
    resumed = learn(name, run, 8, resume=True, keep_checkpoints=6)
    assert_same_run(whole, resumed)
    assert kept(run) == [3, 4, 5, 6, 7, 8]
    RunDirectory(run).rewind(4)  # its states are still there after a resume from an earlier one
    assert_same_run(later, learn(name, run, 9, resume=True))


def test_a_run_that_went_back_to_its_last_round_has_its_results_again(tmp_path: Path) -> None:
    run = learn("FedEP on disk", tmp_path, 4)
    scores = cs.load_run(tmp_path).evaluation
    RunDirectory(tmp_path).rewind(4)
    learn("FedEP on disk", tmp_path, 4, resume=True)
    assert_same(cs.load_posterior(tmp_path), run.posterior)
    assert cs.load_run(tmp_path).evaluation == scores


def test_states_that_no_kept_checkpoint_names_are_deleted(tmp_path: Path) -> None:
    def states() -> set[tuple[int, ...]]:
        return {tuple(map(int, path.stem.split("-"))) for path in (tmp_path / "states").iterdir()}

    learn("FedEP on disk", tmp_path, 8, keep_checkpoints=4)
    RunDirectory(tmp_path).rewind(6)
    learn("FedEP on disk", tmp_path, 14, keep_checkpoints=2, resume=True)
    whole = tmp_path / "whole"
    learn("FedEP on disk", whole, 14)
    assert states() == {tuple(map(int, path.stem.split("-"))) for path in (whole / "states").iterdir()}


def test_a_round_without_a_checkpoint_is_refused_and_those_with_one_are_listed(tmp_path: Path) -> None:
    learn("FedAvg, Adam", tmp_path, 6, keep_checkpoints=3)
    with pytest.raises(CheckpointError, match="has no checkpoint of round 2: there are those of 4, 5, 6"):
        RunDirectory(tmp_path).rewind(2)
    newest = checkpoints(tmp_path)[0]
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="has no checkpoint of round 6: there are those of 4, 5"):
        RunDirectory(tmp_path).rewind(6)
    assert kept(tmp_path) == [4, 5, 6]


def test_the_types_of_a_users_own_method_need_not_be_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn("FedAvg, Adam", tmp_path, 4)
    with monkeypatch.context() as elsewhere:
        elsewhere.delitem(records._types, records.type_name(type(learn("FedAvg, Adam", None, 1).server)))
        RunDirectory(tmp_path).rewind(3)
    assert_same_run(learn("FedAvg, Adam", None, 4), learn("FedAvg, Adam", tmp_path, 4, resume=True))


def test_the_command_lists_checkpoints_and_goes_back(tmp_path: Path) -> None:
    learn("FedAvg, Adam", tmp_path, 6, keep_checkpoints=3)
    call = CliRunner().invoke
    assert call(app, ["rewind", str(tmp_path)]).stdout == "round 4\nround 5\nround 6\n"
    assert "is at round 5; resume it" in call(app, ["rewind", str(tmp_path), "--round", "5"]).stderr.replace("\n", " ")
    assert kept(tmp_path) == [4, 5]
    for words, sentence in (
        ([str(tmp_path), "--round", "1"], "there are those of 4, 5"),
        ([str(tmp_path / "nowhere"), "--round", "1"], "is not a run directory: it has no run.json"),
        ([str(tmp_path / "nowhere")], "is not a run directory: it has no run.json"),
    ):
        assert sentence in str(call(app, ["rewind", *words]).exception)


def test_a_run_at_work_does_not_go_back(tmp_path: Path) -> None:
    learn("FedAvg, Adam", tmp_path, 6)
    with RunDirectory(tmp_path).locked(), pytest.raises(CheckpointError, match="is at work in"):
        RunDirectory(tmp_path).rewind(5)
