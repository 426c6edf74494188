"""A run's rounds as tables: frames, CSV files and TensorBoard, whole after a kill and the same after a resume."""

import csv
import sys
from pathlib import Path
from typing import Any

import pytest

import consilience as cs
from consilience.core.errors import CallbackError, ConfigError
from consilience.runs.rows import Sheet, flat
from consilience.runs.tracking import CSV, MLflow, TensorBoard, WandB
from consilience.studies.compare import compare
from consilience.studies.comparison import Comparison, Row
from consilience.studies.setting import Setting
from support.runs import HERE, Power, cut
from support.scenarios import blobs, linear
from support.sealed import lines

FEDEP = cs.FedEP(cs.inference.Identity(cs.SGD(lr=0.05, batch_size=4)))
FEDAVG = cs.FedAvg(cs.SGD(lr=0.1, batch_size=4))
OPTIONS: dict[str, Any] = {"rounds": 4, "engine": HERE, "progress": False, "evaluate_every": 2}


def timeless(path: Path) -> list[dict[str, str]]:
    """A CSV file's rows but for the clock; every row must have all columns."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert all(None not in row and None not in row.values() for row in rows)
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


# Rows


def test_a_round_is_a_flat_row() -> None:
    line = {
        "round": 3,
        "loss": 0.5,
        "rejected": [{"client": "a", "reason": "b"}],
        "guards": {"floor": 3, "clip": 4},
        "audit": {"gap": 0.1},
        "eval": {"accuracy": 0.9, "loss": 7.0},
        "marginal": {"accuracy": 0.8},
    }
    assert flat(line) == {
        "round": 3,
        "loss": 0.5,
        "rejected": 1,
        "guards": 7,
        "audit gap": 0.1,
        "accuracy": 0.9,
        "loss (test)": 7.0,
        "accuracy (marginal)": 0.8,
    }


def test_a_sheet_has_one_header_whenever_its_columns_come() -> None:
    sheet = Sheet([{"round": 1, "loss": 0.5}])
    assert sheet.text() == "round,loss\n1,0.5\n"
    assert sheet.add({"round": 2, "loss": 0.25}) == "2,0.25\n"
    assert sheet.add({"round": 3, "eval": {"a, b": float("nan")}}) is None
    assert sheet.text() == 'round,loss,"a, b"\n1,0.5,\n2,0.25,\n3,,nan\n'
    assert Sheet().text() == ""


# Frames


def test_a_runs_frame_has_a_row_a_round_and_a_column_a_metric() -> None:
    pytest.importorskip("pandas")
    task, federation, test = blobs()
    run = cs.fit(FEDEP, task, federation, test=test, **OPTIONS)
    found = run.frame()
    assert list(found["round"]) == [1, 2, 3, 4]
    assert list(found["loss"]) == [line["loss"] for line in run.history]
    scored = found.dropna(subset=["accuracy"])
    assert list(scored["round"]) == [2, 4]
    assert scored["accuracy"].iloc[-1] == run.history[-1]["eval"]["accuracy"]
    assert scored["nll (marginal)"].iloc[-1] == run.history[-1]["marginal"]["nll"]


def test_a_comparisons_frames_are_its_table_and_every_round_of_its_runs(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    done = compare([FEDAVG], Setting(*blobs()), seeds=2, out=tmp_path / "out", **OPTIONS)
    done.rows.append(Row("FedAvg", "f1", 0.5, None, 1, paper=0.75))
    table = done.frame()
    assert list(table.columns) == ["method", "metric", "mean", "std", "n", "paper"]
    assert len(table) == len(done.rows)
    assert table["paper"].iloc[-1] == 0.75
    assert pandas.isna(table["std"].iloc[-1])
    rounds = done.frame(runs=True)
    assert list(rounds.columns[:3]) == ["method", "seed", "round"]
    assert list(zip(rounds["seed"], rounds["round"], strict=True)) == [(s, r) for s in (0, 1) for r in range(1, 5)]
    last = rounds[(rounds["seed"] == 1) & (rounds["round"] == 4)].iloc[0]
    assert last["accuracy"] == cs.load_run(tmp_path / "out" / "FedAvg" / "seed-1").history[-1]["eval"]["accuracy"]


def test_without_pandas_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"pip install 'consilience\[frames\]'"):
        Comparison("Empty").frame()


# CSV


def test_a_run_directory_has_its_metrics_as_csv(tmp_path: Path) -> None:
    task, federation, test = blobs()
    run = cs.fit(FEDEP, task, federation, test=test, out=tmp_path / "run", **OPTIONS)
    text = (tmp_path / "run" / "metrics.csv").read_text()
    assert text == Sheet(run.history).text()
    assert text == Sheet(lines(tmp_path / "run")).text()


def test_the_csv_of_a_resumed_run_is_that_of_one_that_was_never_interrupted(tmp_path: Path) -> None:
    task, federation, test = blobs()
    parts = cs.runs.Storage(tmp_path / "parts", checkpoint_every=2)
    cs.fit(FEDEP, task, federation, test=test, out=tmp_path / "whole", **OPTIONS)
    with pytest.raises(Power):
        cs.fit(FEDEP, task, federation, test=test, out=parts, callbacks=[cut(3)], **OPTIONS)
    assert [row["round"] for row in timeless(tmp_path / "parts" / "metrics.csv")] == ["1", "2"]
    follow = CSV(tmp_path / "followed.csv")
    cs.fit(FEDEP, task, federation, test=test, out=parts, resume=True, callbacks=[follow], **OPTIONS)
    whole = timeless(tmp_path / "whole" / "metrics.csv")
    assert len(whole) == 4
    assert timeless(tmp_path / "parts" / "metrics.csv") == whole
    assert timeless(tmp_path / "followed.csv") == whole


def test_a_finished_run_without_a_csv_gets_one_when_it_is_resumed(tmp_path: Path) -> None:
    task, federation = linear()
    cs.fit(FEDAVG, task, federation, out=tmp_path, **OPTIONS)
    before = (tmp_path / "metrics.csv").read_bytes()
    (tmp_path / "metrics.csv").unlink()
    cs.fit(FEDAVG, task, federation, out=tmp_path, resume=True, **OPTIONS)
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_a_csv_is_complete_after_every_round(tmp_path: Path) -> None:
    task, federation, test = blobs()
    seen = []
    follow = CSV(tmp_path / "new" / "rounds.csv")

    def look(run: cs.runs.Run, line: dict[str, Any]) -> None:
        seen.append(follow.path.read_text() == Sheet(run.history).text())

    cs.fit(FEDEP, task, federation, test=test, callbacks=[follow, look], **OPTIONS)
    assert seen == [True] * 4
    with pytest.raises(CallbackError, match="make a CSV for each run"):
        cs.fit(FEDAVG, task, federation, callbacks=[follow], **OPTIONS)


# TensorBoard


def scalars(directory: Path) -> dict[str, dict[int, float]]:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = events.EventAccumulator(str(directory))
    read.Reload()
    return {tag: {event.step: event.value for event in read.Scalars(tag)} for tag in read.Tags()["scalars"]}


def test_tensorboard_shows_every_round_even_of_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    task, federation, test = blobs()
    seen = []

    def look(run: cs.runs.Run, line: dict[str, Any]) -> None:
        seen.append(len(scalars(tmp_path / "board")["loss"]))

    board, out = TensorBoard(tmp_path / "board"), cs.runs.Storage(tmp_path / "run", checkpoint_every=2)
    with pytest.raises(Power):
        cs.fit(FEDEP, task, federation, test=test, out=out, callbacks=[board, look, cut(3)], **OPTIONS)
    assert seen == [1, 2, 3]
    board = TensorBoard(tmp_path / "board")
    again = {"out": out, "resume": True, "callbacks": [board]}
    run = cs.fit(FEDEP, task, federation, test=test, **again, **OPTIONS)
    found = scalars(tmp_path / "board")
    assert {"loss", "seconds", "bytes/down", "bytes/up", "eval/accuracy", "marginal/nll"} <= set(found)
    assert found["loss"] == pytest.approx({line["round"]: line["loss"] for line in run.history})
    assert found["eval/accuracy"] == pytest.approx(
        {line["round"]: line["eval"]["accuracy"] for line in run.history if "eval" in line}
    )


def test_without_tensorboard_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'consilience\[track\]'"):
        TensorBoard(tmp_path)


@pytest.mark.parametrize("follower", [CSV, TensorBoard])
def test_a_place_that_cannot_be_written_to_gets_a_sentence(tmp_path: Path, follower: Any) -> None:
    (tmp_path / "file").write_text("mine")
    task, federation = linear()
    with pytest.raises((CallbackError, ConfigError), match=r"file/x cannot be written \(.*\): choose another place"):
        cs.fit(FEDAVG, task, federation, callbacks=[follower(tmp_path / "file" / "x")], **OPTIONS)
    assert (tmp_path / "file").read_text() == "mine"


def test_anything_with_two_arguments_is_a_callback() -> None:
    task, federation = linear()
    seen: list[int] = []
    follow: cs.runs.Callback = lambda run, line: seen.append(line["round"])  # noqa: E731
    cs.fit(FEDAVG, task, federation, callbacks=[follow], **OPTIONS)
    assert seen == [1, 2, 3, 4]


# Weights & Biases, MLflow


def broken_and_resumed(out: Path, follow: Any) -> cs.runs.Run:
    """A run that is cut in its third round and resumed, each part with a callback of its own."""
    task, federation, test = blobs()
    options = {**OPTIONS, "test": test, "out": cs.runs.Storage(out, checkpoint_every=2)}
    with pytest.raises(Power):
        cs.fit(FEDEP, task, federation, callbacks=[follow(), cut(3)], **options)
    return cs.fit(FEDEP, task, federation, resume=True, callbacks=[follow()], **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_every_round_even_of_a_resumed_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    place = f"sqlite:///{tmp_path}/mlflow.db"
    pytest.importorskip("sqlalchemy")
    run = broken_and_resumed(tmp_path / "run", lambda: MLflow(place, experiment="hospitals"))
    client = mlflow.MlflowClient(place)
    (found,) = client.search_runs([client.get_experiment_by_name("hospitals").experiment_id])
    losses = {metric.step: metric.value for metric in client.get_metric_history(found.info.run_id, "loss")}
    assert losses == {line["round"]: line["loss"] for line in run.history}
    assert found.data.metrics["eval/accuracy"] == run.history[-1]["eval"]["accuracy"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_has_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    task, federation, test = blobs()
    follow = WandB(project="hospitals", dir=tmp_path, mode="offline")
    run = cs.fit(FEDEP, task, federation, test=test, callbacks=[follow], out=tmp_path / "run", **OPTIONS)
    summary = dict(follow._run.summary)
    assert summary["eval/accuracy"] == run.history[-1]["eval"]["accuracy"]
    follow._run.finish()
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))


@pytest.mark.parametrize(("package", "make"), [("wandb", WandB), ("mlflow", MLflow)])
def test_without_a_tracker_a_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, package: str, make: Any
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install 'consilience\[{package}\]'"):
        make()
