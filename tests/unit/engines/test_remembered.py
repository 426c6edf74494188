"""Plans that earlier runs found: when they are followed, and what damage does to their file."""

import json
import logging
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import consilience as cs
from consilience.engines import remembered
from consilience.engines.plan import Plan
from consilience.engines.remembered import CACHED, COMPILING, FASTER, Known, Remembered, Timed, key_of
from support.runs import TRAIN, fit, timeless
from support.scenarios import linear

PLAIN, COMPILED = Plan(2, 2, 1), Plan(2, 2, 1, True)
KNOWN = Known(Timed(PLAIN, 0.10), (PLAIN, Plan(1, 2, 1)), Timed(COMPILED, 0.06, 4.0))
ENGINE = cs.Simulator(device="cpu")


@pytest.fixture(autouse=True)
def _idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.1, 0.1))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache" / "plans.json"
    monkeypatch.setenv("CONSILIENCE_PLANS", str(path))
    return path


def test_compiling_must_pay_within_the_planned_rounds() -> None:
    assert KNOWN.best(99).plan == PLAIN
    assert KNOWN.best(101).plan == COMPILED
    never = replace(KNOWN, compiled=None)
    worth = COMPILING[0] / FASTER / KNOWN.plain.round
    assert not never.is_worth_compiling(int(0.9 * worth), COMPILING[0])
    assert never.is_worth_compiling(int(1.1 * worth), COMPILING[0])
    assert never.expected.before == CACHED


def test_what_was_remembered_is_recalled_and_can_be_cleared(file: Path) -> None:
    plans = Remembered.default()
    assert plans.recall("a") is None
    plans.remember("a", KNOWN)
    assert plans.recall("a") == KNOWN
    assert plans.recall("b") is None
    plans.clear()
    assert not file.exists()
    assert plans.recall("a") is None


def test_times_on_a_busy_machine_are_not_remembered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (1e3, 1e3, 1e3))
    Remembered.default().remember("a", KNOWN)
    assert Remembered.default().recall("a") is None


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSILIENCE_PLANS", "off")
    Remembered.default().remember("a", KNOWN)
    assert Remembered.default().recall("a") is None


def test_the_file_is_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CONSILIENCE_PLANS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Remembered.default().path == tmp_path / "consilience" / "plans.json"


def test_earlier_compiles_say_how_long_the_next_one_takes(file: Path) -> None:
    plans = Remembered.default()
    least, each = COMPILING
    assert plans.compiling(10) == least + 10 * each
    for seconds in (3, 2, 1):
        plans.note_compiling(10, seconds * plans.compiling(10) if seconds == 3 else seconds * (least + 10 * each))
    assert plans.compiling(20) == pytest.approx(2 * (least + 20 * each))


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"[]", b"null", b'{"plans": [], "compiling": []}', b'{"plans": {"a": 1}, "compiling": [null, -1]}',
        b"\xff\xfe", b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_file_is_an_empty_one(file: Path, damage: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(damage)
    plans = Remembered.default()
    assert plans.recall("a") is None
    assert plans.compiling(1) == sum(COMPILING)
    plans.remember("a", KNOWN)
    assert plans.recall("a") == KNOWN


@pytest.mark.parametrize(
    ("name", "value"),
    [("chunk", 0), ("chunk", 2.0), ("chunk", True), ("workers", "2"), ("threads", -1), ("device", None), ("more", 1)],
)
def test_an_entry_that_is_no_plan_is_none(file: Path, name: str, value: object) -> None:
    plans = Remembered.default()
    plans.remember("a", KNOWN)
    content = json.loads(file.read_text())
    content["plans"]["a"]["plain"]["plan"][name] = value
    file.write_text(json.dumps(content))
    assert plans.recall("a") is None


def test_an_entry_without_plans_to_compile_is_none(file: Path) -> None:
    plans = Remembered.default()
    plans.remember("a", replace(KNOWN, candidates=()))
    assert plans.recall("a") is None


@pytest.mark.parametrize("seconds", [-1, None, "1", float("inf"), float("nan")])
def test_an_entry_without_times_is_none(file: Path, seconds: object) -> None:
    plans = Remembered.default()
    plans.remember("a", KNOWN)
    content = json.loads(file.read_text())
    content["plans"]["a"]["plain"]["round"] = seconds
    file.write_text(json.dumps(content))
    assert plans.recall("a") is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    plans = Remembered(tmp_path / "file" / "plans.json")
    plans.remember("a", KNOWN)
    assert plans.recall("a") is None


def remember_many(path: Path, writer: int) -> None:
    for number in range(10):
        Remembered(path).remember(f"{writer} {number}", KNOWN)


def test_writers_at_the_same_time_lose_nothing(file: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=remember_many, args=(file, writer)) for writer in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    plans = Remembered(file)
    assert all(plans.recall(f"{writer} {number}") == KNOWN for writer in range(4) for number in range(10))


def test_the_newest_are_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "MOST", 2)
    plans = Remembered.default()
    for key in "abca":
        plans.remember(key, KNOWN)
    assert [key for key in "abc" if plans.recall(key)] == ["a", "c"]


def test_a_key_tells_methods_networks_and_clients_apart() -> None:
    task, federation = linear()
    wider = linear(features=5)[0]
    keys = [
        key_of(ENGINE, cs.FedAvg(TRAIN), task, federation, 5, 1),
        key_of(ENGINE, cs.FedAvg(replace(TRAIN, batch_size=2)), task, federation, 5, 1),
        key_of(ENGINE, cs.FedProx(TRAIN), task, federation, 5, 1),
        key_of(ENGINE, cs.FedAvg(TRAIN), wider, federation, 5, 1),
        key_of(ENGINE, cs.FedAvg(TRAIN), task, federation, 4, 1),
        key_of(ENGINE, cs.FedAvg(TRAIN), task, federation, 5, 2),
        key_of(replace(ENGINE, chunk=2), cs.FedAvg(TRAIN), task, federation, 5, 1),
    ]
    assert len({*keys}) == len(keys)
    assert key_of(ENGINE, cs.FedAvg(TRAIN), *linear(), 5, 1) == keys[0]


def test_a_second_run_follows_the_plan_of_the_first(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    task, federation = linear()
    first = fit(cs.FedAvg(TRAIN), task, federation, engine=ENGINE)
    content = json.loads(file.read_text())
    (entry,) = content["plans"].values()
    entry["plain"]["plan"] |= {"chunk": 3, "workers": 1, "threads": 1, "why": "from the file"}
    file.write_text(json.dumps(content))
    second = fit(cs.FedAvg(TRAIN), task, federation, engine=ENGINE)
    assert second.plan == Plan(3, 1, 1, False, "from the file")
    assert first.plan is not None
    assert not first.plan.compile  # four rounds are not worth it
    torch.testing.assert_close(first.posterior.mean, second.posterior.mean)
    other = fit(cs.FedProx(TRAIN), task, federation, engine=ENGINE)
    assert other.plan is not None
    assert other.plan.why != "from the file"


def test_a_resumed_run_follows_its_own_plan(file: Path, tmp_path: Path) -> None:
    task, federation = linear()
    whole = fit(cs.FedAvg(TRAIN), task, federation, engine=ENGINE, out=tmp_path / "whole")
    fit(cs.FedAvg(TRAIN), task, federation, engine=ENGINE, out=tmp_path / "run", rounds=2)
    stored = json.loads((tmp_path / "run" / "run.json").read_text())["plans"]
    Remembered.default().clear()
    resumed = fit(cs.FedAvg(TRAIN), task, federation, engine=ENGINE, out=tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["plans"] == stored
    assert not file.exists()
    torch.testing.assert_close(resumed.posterior.mean, whole.posterior.mean)
    assert [line["round"] for line in resumed.history] == [1, 2, 3, 4]


@pytest.mark.slow
def test_what_is_worth_it_is_compiled_timed_and_remembered(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    task, federation = linear((8, 8, 8, 8), None)
    plain = fit(cs.FedAvg(TRAIN), task, federation, engine=ENGINE)
    Remembered.default().clear()
    monkeypatch.setattr(remembered, "COMPILING", (1e-6, 1e-9))
    said: list[str] = []
    monkeypatch.setattr("consilience.runs.progress.Wait.say", lambda self, what: said.append(what))
    run = fit(cs.FedAvg(TRAIN), task, federation, engine=ENGINE)
    assert run.plan is not None
    assert "compiled " in run.plan.why
    assert said[:2] == ["choosing a plan", "compiling"]
    (entry,) = json.loads(file.read_text())["plans"].values()
    assert entry["compiled"]["plan"]["compile"]
    assert 0 < entry["compiled"]["before"] <= CACHED
    torch.testing.assert_close(run.posterior.mean, plain.posterior.mean)
    assert timeless(run.history)[0]["clients"] == timeless(plain.history)[0]["clients"]
    assert "compiled code refused" not in caplog.text
    caplog.set_level(logging.INFO)
    said.clear()
    again = fit(cs.FedAvg(TRAIN), task, federation, engine=ENGINE)
    assert "choosing a plan" not in said
    torch.testing.assert_close(again.posterior.mean, plain.posterior.mean)
