"""A client whose update cannot be used is rejected and named; the others go on."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import consilience as cs
from consilience.core.errors import RecordError
from consilience.core.records import tree_map
from support.runs import FORKED, HERE, PARAMETERS, TRAIN, Power, assert_same_run, checkpoints, cut, fit, read_lines
from support.scenarios import NAMES, linear


@cs.algorithm
class Tampered(cs.LocalOnly):
    """LocalOnly, but something happens to the clients `victims` from round `since` on."""

    train: cs.SGD = TRAIN
    victims: tuple[int, ...] = (3,)
    since: int = 2
    what: str = "nan"

    def local(self, task: cs.Task, message: Any, state: Any, cohort: cs.data.Cohort) -> Any:
        update, new = cs.LocalOnly.local(self, task, message, state, cohort)
        hit = torch.isin(cohort.ids, torch.tensor(self.victims)) & (cohort.round >= self.since)
        if self.what == "raise" and bool(hit.any()):
            raise ZeroDivisionError("no beds left")
        bad = float(self.what) if self.what != "raise" else 0.0
        poison = torch.where(hit, bad, 0.0).unsqueeze(1)
        return tree_map(lambda leaf: leaf + poison, update), new


@pytest.mark.parametrize(
    ("engine", "bad"),
    [(HERE, "nan"), (FORKED, "inf"), (replace(HERE, chunk=1), "-inf")],
    ids=["batched", "forked", "one by one"],
)
def test_a_client_with_an_update_that_is_not_finite_is_rejected_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, engine: cs.Simulator, bad: str
) -> None:
    task, federation = linear()
    with caplog.at_level(logging.WARNING, "consilience"):
        run = fit(Tampered(what=bad), task, federation, engine=engine, out=tmp_path / "run")
    expected = [{"client": "Genf", "reason": "its update's total.theta is not finite"}]
    assert [line["rejected"] for line in run.history] == [[], expected, expected, expected]
    assert [line["clients"] for line in run.history] == [5, 4, 4, 4]
    assert read_lines(tmp_path / "run") == run.history
    warned = [r.getMessage() for r in caplog.records if "was rejected" in r.getMessage()]
    assert warned == [
        f"round {n}: the update of client 'Genf' was rejected: its update's total.theta is not finite"
        for n in (2, 3, 4)
    ]
    assert bool(run.posterior.mean.isfinite().all())
    kept = torch.tensor([0, 1, 2, 4])
    own = torch.stack([run.personal(int(c)).mean for c in kept])
    weight = federation.sizes[kept].unsqueeze(1)
    torch.testing.assert_close(run.posterior.mean, (own * weight).sum(0) / weight.sum(), msg="the others' average")


def test_a_rejected_clients_state_stays_as_it_was() -> None:
    task, federation = linear()
    states = []
    fit(Tampered(), task, federation, callbacks=[lambda run, _: states.append(run.personal(3).mean)])
    assert all(torch.equal(state, states[0]) for state in states)


def test_a_client_whose_own_data_blow_up_is_rejected() -> None:
    task, federation = linear()
    x = federation.data.x.clone()
    x[federation.indices(1)] *= 1e25
    wild = replace(federation, data=replace(federation.data, x=x))
    run = fit(cs.FedAvg(cs.SGD(lr=0.1, batch_size=1)), task, wild, rounds=2)
    assert [[r["client"] for r in line["rejected"]] for line in run.history] == [["Bern"], ["Bern"]]
    assert bool(run.posterior.mean.isfinite().all())
    assert not torch.equal(run.posterior.mean, torch.zeros(PARAMETERS))


EVERYBODY = (0, 1, 2, 3, 4)


def test_a_round_that_rejects_everybody_keeps_the_model_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task, federation = linear()
    run = fit(Tampered(victims=EVERYBODY), task, federation, out=tmp_path / "run", test=federation)
    once = fit(Tampered(), task, federation, rounds=1)
    assert torch.equal(run.posterior.mean, once.posterior.mean)
    assert [line["clients"] for line in run.history] == [5, 0, 0, 0]
    assert all({r["client"] for r in line["rejected"]} == set(NAMES) for line in run.history[1:])
    assert read_lines(tmp_path / "run") == run.history
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        "round 2: the update of every client was rejected, and nothing is learned: "
        "its update's total.theta is not finite"
    ]


NOTHING_LEARNED = "no client's update was accepted in any of 2 rounds, so the model is as it began"


def test_a_run_that_has_accepted_nothing_is_no_success_also_when_it_is_resumed(tmp_path: Path) -> None:
    task, federation = linear()
    options: dict[str, Any] = {"rounds": 2, "out": tmp_path / "run", "test": federation}
    for resume in (False, True):
        with pytest.raises(cs.ConsilienceError, match=NOTHING_LEARNED):
            fit(Tampered(victims=EVERYBODY, since=1), task, federation, resume=resume, **options)
        assert [line["clients"] for line in read_lines(tmp_path / "run")] == [0, 0]
        assert not (tmp_path / "run" / "evaluation.json").exists()


def test_a_run_may_begin_to_learn_when_it_goes_on(tmp_path: Path) -> None:
    class Late(cs.LocalOnly):
        def local(self, task: cs.Task, message: Any, state: Any, cohort: cs.data.Cohort) -> Any:
            update, new = super().local(task, message, state, cohort)
            return tree_map(lambda leaf: leaf * (torch.nan if cohort.round <= 2 else 1), update), new

    task, federation = linear()
    with pytest.raises(cs.ConsilienceError, match=NOTHING_LEARNED):
        fit(Late(TRAIN), task, federation, rounds=2, out=tmp_path / "run")
    run = fit(Late(TRAIN), task, federation, rounds=3, out=tmp_path / "run", resume=True)
    assert [line["clients"] for line in run.history] == [0, 0, 5]


def test_the_second_method_of_a_switch_must_learn_too() -> None:
    task, federation = linear()
    method = cs.Switch(cs.FedAvg(TRAIN), Tampered(victims=EVERYBODY), at=2)
    with pytest.raises(cs.ConsilienceError, match=f"Tampered: {NOTHING_LEARNED}"):
        fit(method, task, federation)


def test_a_server_that_is_not_finite_is_named_and_not_its_clients(caplog: pytest.LogCaptureFixture) -> None:
    class Bursting(cs.LocalOnly):
        def fuse(self, server: Any, update: Any) -> cs.Point:
            return cs.Point(server.theta + torch.inf)

        def local(self, task: cs.Task, message: Any, state: Any, cohort: cs.data.Cohort) -> Any:
            update, new = super().local(task, message, state, cohort)
            return tree_map(lambda leaf: leaf + message.theta.sum(), update), new

    task, federation = linear()
    run = fit(Bursting(TRAIN), task, federation)
    reason = "the server's own theta is not finite"
    assert [{r["reason"] for r in line["rejected"]} for line in run.history] == [set(), {reason}, {reason}, {reason}]
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        f"round 2: the update of every client was rejected, and nothing is learned: {reason}",
        f"{reason}, so the model is of no use: take smaller steps (lr)",
    ]


def test_a_rejected_client_is_no_hindrance_to_resuming(tmp_path: Path) -> None:
    task, federation = linear()
    whole = fit(Tampered(), task, federation, rounds=6)
    with pytest.raises(Power):
        fit(Tampered(), task, federation, rounds=6, out=tmp_path / "run", callbacks=[cut(4)])
    assert_same_run(whole, fit(Tampered(), task, federation, rounds=6, out=tmp_path / "run", resume=True))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_in_a_clients_code_names_client_round_and_stage(tmp_path: Path, workers: int) -> None:
    task, federation = linear()
    engine = cs.Simulator(device="cpu", chunk=1, workers=workers)
    with pytest.raises(cs.core.errors.ClientError) as caught:
        fit(Tampered(what="raise", since=3), task, federation, engine=engine, out=tmp_path / "run")
    error = caught.value
    assert (error.client, error.round, error.stage) == ("Genf", 3, "local")
    assert str(error) == "client 'Genf' failed in round 3, stage 'local': ZeroDivisionError: no beds left"
    assert [path.stem for path in checkpoints(tmp_path / "run")] == ["round-0000002", "round-0000001"]


@pytest.mark.parametrize("engine", [HERE, FORKED], ids=["here", "forked"])
def test_a_state_of_the_wrong_shape_is_refused_before_it_is_kept(engine: cs.Simulator) -> None:
    class Growing(cs.LocalOnly):
        def local(self, task: cs.Task, message: Any, state: Any, cohort: cs.data.Cohort) -> Any:
            update, new = super().local(task, message, state, cohort)
            return update, cs.Point(torch.cat([new.theta, new.theta], dim=1))

    task, federation = linear()
    with pytest.raises(RecordError, match=r"client state: theta has shape \(5, 8\) where \(5, 4\) was expected"):
        fit(Growing(TRAIN), task, federation, engine=engine)


@pytest.mark.parametrize(
    ("engine", "what"), [(None, "update's total.theta"), (HERE, "new state's theta"), (FORKED, "new state's theta")]
)
def test_an_update_or_state_without_a_row_for_each_client_is_refused(engine: cs.Simulator | None, what: str) -> None:
    class Forgetful(cs.LocalOnly):
        def local(self, task: cs.Task, message: Any, state: Any, cohort: cs.data.Cohort) -> Any:
            update, new = super().local(task, message, state, cohort)
            if what.startswith("update"):
                return cs.Weighted(cs.Point(update.total.theta.sum(0)), update.weight), new
            return update, cs.Point(new.theta.sum(0))

    task, federation = linear()
    sentence = rf"local must return a row for each of the \d clients, but its {what} has shape \(4,\)"
    with pytest.raises(cs.ConsilienceError, match=sentence):
        fit(Forgetful(TRAIN), task, federation, engine=engine)


def test_states_without_a_row_for_each_client_are_refused() -> None:
    class Forgetful(cs.LocalOnly):
        def client(self, task: cs.Task, info: cs.data.Info, n: Tensor) -> Any:
            return cs.Point(info.initial)

    sentence = r"client must return a row for each of the \d clients, but its theta has shape \(4,\)"
    with pytest.raises(RecordError, match=sentence):
        fit(Forgetful(TRAIN), *linear())
