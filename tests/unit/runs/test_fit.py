"""fit: what a run leaves behind, that a resumed run is the same run, and that one bad client spoils nothing."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import consilience as cs
from consilience.config import read_config
from consilience.core.errors import CheckpointError, ConfigError, DataError, RecordError
from consilience.core.records import tree_map, unpack
from consilience.engines.states import InMemory
from consilience.evaluation.scores import evaluate
from consilience.runs import directory
from consilience.runs.directory import RunDirectory
from consilience.studies.compare import compare
from consilience.studies.setting import Setting
from support.runs import (
    FORKED,
    HERE,
    PARAMETERS,
    TRAIN,
    Power,
    assert_same,
    assert_same_run,
    checkpoints,
    cut,
    files,
    fit,
    read_lines,
    timeless,
)
from support.scenarios import NAMES, SIZES, blobs, gradient, linear

COMPARED = {"rounds": 1, "engine": HERE, "progress": False}


# What a run is


def test_one_full_batch_step_by_everyone_is_gradient_descent_on_the_pooled_loss() -> None:
    task, federation = linear()
    run = fit(cs.FedAvg(cs.SGD(lr=0.1, batch_size=max(SIZES))), task, federation, rounds=3)
    theta = torch.zeros(PARAMETERS)
    for _ in range(3):
        theta = theta - 0.1 * gradient(federation.data, theta)
    torch.testing.assert_close(run.posterior.mean, theta)


def test_the_history_has_a_line_a_round_and_its_loss_is_weighted_by_examples() -> None:
    task, federation = linear()
    run = fit(cs.FedAvg(cs.SGD(lr=0.0, batch_size=max(SIZES))), task, federation, rounds=3)
    assert [line["round"] for line in run.history] == [1, 2, 3]
    assert all(line["clients"] == len(SIZES) and line["rejected"] == [] for line in run.history)
    loss = float(0.5 * federation.data.y.square().mean())  # of the zero model, over everybody's examples
    assert run.history[0]["loss"] == pytest.approx(loss, rel=1e-6)


def test_bytes_are_those_of_the_weights_down_and_of_weights_and_one_count_up() -> None:
    task, federation = linear()
    (line,) = fit(cs.FedAvg(TRAIN), task, federation, rounds=1, cohort=3).history
    assert line["bytes_down"] == 3 * PARAMETERS * 4
    assert line["bytes_up"] == 3 * (PARAMETERS + 1) * 4


def test_the_server_optimizers_memory_is_not_sent() -> None:
    task, federation = linear()
    (line,) = fit(cs.FedAvg(TRAIN, server=cs.server.Adam()), task, federation, rounds=1).history
    assert line["bytes_down"] == len(SIZES) * PARAMETERS * 4


def test_a_cohort_is_drawn_anew_each_round_from_the_seed() -> None:
    task, federation = linear(sizes=(2,) * 12, names=None)
    everyone = set()

    def watch(run: cs.runs.Run, line: dict[str, Any]) -> None:
        everyone.update({c for c in range(12) if not torch.equal(run.personal(c).mean, torch.zeros(PARAMETERS))})

    fit(cs.LocalOnly(TRAIN), task, federation, rounds=1, cohort=3, callbacks=[watch])
    first = set(everyone)
    fit(cs.LocalOnly(TRAIN), task, federation, rounds=6, cohort=3, callbacks=[watch])
    assert len(first) == 3
    assert len(everyone) > 6
    everyone.clear()
    fit(cs.LocalOnly(TRAIN), task, federation, rounds=1, cohort=3, seed=1, callbacks=[watch])
    assert everyone != first


def test_metrics_on_disk_are_the_history(tmp_path: Path) -> None:
    task, train, test = blobs()
    run = fit(cs.FedAvg(TRAIN), task, train, test=test, out=tmp_path / "run", evaluate_every=2)
    assert read_lines(tmp_path / "run") == run.history
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text()) == run.evaluate(test).to_json()


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

    def slowly(self: RunDirectory, round: int, saved: Any, belief: Any) -> None:
        assert third.wait(60)
        write(self, round, saved, belief)

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


def test_an_error_about_a_file_elsewhere_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fit(cs.FedAvg(TRAIN), *linear(), out=tmp_path / "run", callbacks=[lambda *_: (tmp_path / "x").read_text()])


def test_callbacks_are_called_with_the_run_and_the_line_after_each_round() -> None:
    task, federation = linear()
    seen: list[tuple[cs.runs.Run, dict[str, Any], Tensor]] = []
    run = fit(cs.FedAvg(TRAIN), task, federation, callbacks=[lambda r, line: seen.append((r, line, r.posterior.mean))])
    assert [line for _, line, _ in seen] == run.history
    assert all(r is run for r, _, _ in seen)
    assert torch.equal(seen[-1][2], run.posterior.mean)
    assert not torch.equal(seen[-2][2], run.posterior.mean)


@pytest.mark.parametrize(("rounds", "every", "expected"), [(7, 3, [3, 6, 7]), (3, 5, [3]), (20, None, range(2, 21, 2))])
def test_the_model_is_evaluated_every_so_often_and_at_the_end(
    rounds: int, every: int | None, expected: list[int]
) -> None:
    task, federation = linear()
    run = fit(cs.FedAvg(TRAIN), task, federation, rounds=rounds, test=federation.data, evaluate_every=every)
    assert [line["round"] for line in run.history if "eval" in line] == list(expected)


def test_without_test_data_nothing_is_evaluated(tmp_path: Path) -> None:
    task, federation = linear()
    run = fit(cs.FedAvg(TRAIN), task, federation, out=tmp_path / "run", evaluate_every=1)
    assert all("eval" not in line for line in run.history)
    assert not (tmp_path / "run" / "evaluation.json").exists()


def test_the_released_model_predicts_as_the_run_does() -> None:
    task, train, test = blobs()
    run = fit(cs.FedAvg(TRAIN), task, train, rounds=10)
    x = test.data.x[:5]
    expected = run.model(x).softmax(-1)
    torch.testing.assert_close(run.predict(x), expected)
    torch.testing.assert_close(run.predict(x, samples=3), expected)  # a point has nothing to average over
    torch.testing.assert_close(run.predict(x.double().numpy()), expected)
    assert isinstance(run.posterior, cs.Point)
    assert all(parameter.requires_grad for parameter in run.model.parameters())


def test_the_users_module_is_left_alone() -> None:
    module = nn.Linear(3, 1)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    _, federation = linear()
    fit(cs.FedAvg(TRAIN), cs.Regression(module), federation)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_a_run_learns_and_says_how_well_for_each_client_and_for_all() -> None:
    task, train, test = blobs()
    run = fit(cs.FedAvg(cs.SGD(lr=0.3, batch_size=5)), task, train, rounds=20)
    evaluation = run.evaluate(test)
    assert evaluation.point["accuracy"] > 0.9
    assert evaluation.marginal is None
    assert [client["examples"] for client in evaluation.clients] == test.sizes.tolist()
    weights = test.sizes / test.sizes.sum()
    mean = sum(float(w) * c["metrics"]["accuracy"] for w, c in zip(weights, evaluation.clients, strict=True))
    assert evaluation.point["accuracy"] == pytest.approx(mean, abs=1e-6)
    pooled = run.evaluate(test.data[test.order])
    assert pooled.point == pytest.approx(evaluation.point, abs=1e-5)
    assert pooled.clients == []


def test_clients_are_named_in_their_evaluation() -> None:
    task, federation = linear()
    run = fit(cs.FedAvg(TRAIN), task, federation)
    assert [client["name"] for client in run.evaluate(federation).clients] == list(NAMES)


def test_local_only_is_scored_by_every_clients_own_model() -> None:
    task, federation = linear()
    run = fit(cs.LocalOnly(cs.SGD(lr=0.1, batch_size=100)), task, federation, rounds=3)
    for client in range(len(federation)):
        theta = torch.zeros(PARAMETERS)
        for _ in range(3):
            theta = theta - 0.1 * gradient(federation.client(client), theta)
        torch.testing.assert_close(run.personal(client).mean, theta)
    alone = [evaluate(run.task, run.personal(c), federation.client(c)).point["mse"] for c in range(len(federation))]
    assert [client["metrics"]["mse"] for client in run.evaluate(federation).clients] == pytest.approx(alone)
    average = evaluate(run.task, run.posterior, federation)
    assert run.evaluate(federation).point["mse"] != pytest.approx(average.point["mse"])


def test_a_test_of_nobodys_is_dealt_to_clients_that_learn_alone() -> None:
    task, federation = linear()
    run = fit(cs.LocalOnly(cs.SGD(lr=0.1, batch_size=100)), task, federation, rounds=3)
    test, count = federation.data, len(federation)
    turns = [test[torch.arange(c, len(test), count)] for c in range(count)]
    alone = [evaluate(run.task, run.personal(c), turn).point["mse"] * len(turn) for c, turn in enumerate(turns)]
    found = run.evaluate(test)
    assert found.point["mse"] == pytest.approx(sum(alone) / len(test))
    assert found.clients == []


def test_clients_of_a_test_are_known_by_their_names() -> None:
    task, federation = linear()
    run = fit(cs.LocalOnly(cs.SGD(lr=0.1, batch_size=100)), task, federation, rounds=3)
    silos = {federation.name(c): federation.client(c) for c in range(len(federation))}
    straight = {client["name"]: client["metrics"] for client in run.evaluate(federation).clients}
    turned = run.evaluate(cs.Federation.from_silos(dict(reversed(silos.items())))).clients
    assert {client["name"]: client["metrics"] for client in turned} == straight
    (stranger,) = run.evaluate(cs.Federation.from_silos({"elsewhere": federation.client(0)})).clients
    assert stranger["metrics"] == evaluate(run.task, run.posterior, federation.client(0)).point


def test_pooled_sees_everybodys_data_at_once() -> None:
    task, federation = linear()
    run = fit(cs.Pooled(cs.SGD(lr=0.1, batch_size=100)), task, federation, rounds=2, cohort=3, test=federation)
    theta = torch.zeros(PARAMETERS)
    for _ in range(2):
        theta = theta - 0.1 * gradient(federation.data, theta)
    torch.testing.assert_close(run.posterior.mean, theta)
    assert run.history[-1]["clients"] == 1
    assert [client["name"] for client in run.evaluate(federation).clients] == list(NAMES)


def test_a_posterior_is_scored_both_at_its_mean_and_averaged() -> None:
    task, federation = linear()

    @cs.algorithm
    class Uncertain(cs.Algorithm):
        """FedAvg that claims a precision."""

        inner: cs.FedAvg = cs.FedAvg(TRAIN)

        def start(self, task: cs.Task, info: cs.data.Info) -> Any:
            return self.inner.start(task, info)

        def message(self, server: Any, ids: Tensor) -> Any:
            return self.inner.message(server, ids)

        def local(self, task: cs.Task, message: Any, state: Any, cohort: cs.data.Cohort) -> Any:
            return self.inner.local(task, message, state, cohort)

        def fuse(self, server: Any, update: Any) -> Any:
            return self.inner.fuse(server, update)

        def posterior(self, server: Any) -> cs.Gaussian:
            mean = self.inner.posterior(server).mean
            return cs.Gaussian.of(mean, torch.full_like(mean, 4.0))

    run = fit(Uncertain(), task, federation, test=federation.data)
    assert isinstance(run.posterior, cs.Gaussian)
    assert run.history[-1]["marginal"].keys() == run.history[-1]["eval"].keys()
    assert run.history[-1]["marginal"]["mse"] != run.history[-1]["eval"]["mse"]
    x = federation.data.x
    torch.testing.assert_close(run.predict(x, point=True), run.model(x))
    drawn = torch.stack([run.task.predict(theta, x) for theta in run.posterior.sample(10)])
    torch.testing.assert_close(run.predict(x), drawn.mean(0))
    assert not torch.equal(run.predict(x, seed=1), run.predict(x))


# The posterior as a file


POSTERIORS = {
    "a point": (cs.FedAvg(TRAIN), cs.Point),
    "one precision": (cs.FedEP(cs.inference.Identity(TRAIN)), cs.Gaussian),
    "a diagonal": (cs.FedEP(cs.inference.Laplace(TRAIN)), cs.Gaussian),
    "full": (cs.FedEP(cs.inference.Newton(), prior=1.0), cs.Gaussian),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # forward-mode derivatives' own
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

    def one_file_and_no_more(path: Path, data: bytes | str) -> None:
        write(path, data)
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


# Wrong input


@pytest.mark.parametrize("name", ["rounds", "cohort", "checkpoint_every", "evaluate_every"])
@pytest.mark.parametrize("value", [0, -1])
def test_counts_below_one_are_refused_by_name(name: str, value: int) -> None:
    task, federation = linear()
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got {value}"):
        fit(cs.FedAvg(), task, federation, **{name: value})


CHAIN = "must be of type Chain (such as SGD), got"
WRONG_PARTS: dict[str, tuple[Any, str]] = {
    "a number": (lambda: cs.FedProx(0.1), f"FedProx: train {CHAIN} 0.1"),
    "a word": (lambda: cs.FedAvg("SGD"), f"FedAvg: train {CHAIN} 'SGD'"),
    "a class": (lambda: cs.FedAvg(cs.SGD), f"FedAvg: train {CHAIN} the class SGD itself: write SGD(…)"),
    "another part": (lambda: cs.FedEP(cs.SGD()), "FedEP: infer must be of type Tilted (such as Identity), got SGD(…)"),
    "one that may be missing": (lambda: cs.FedEP(site=1), "(such as Momentum) or None, got 1"),
    "a part's part": (
        lambda: cs.FedEP(cs.inference.Identity(cs.optim.SGLD())),
        "Identity: train must be of type SGD, got SGLD(…)",
    ),
    "a number for a part's part": (lambda: cs.inference.Laplace(0.1), "Laplace: train must be of type SGD, got 0.1"),
    "a server's optimiser": (lambda: cs.inference.MCMC(cs.server.Adam()), f"MCMC: train {CHAIN} Adam(…)"),
    "no whole number": (lambda: cs.FedNP(hidden=1.5), "FedNP: hidden must be a whole number, got 1.5"),
    "no number": (lambda: cs.FedProx(mu="0.1"), "FedProx: mu must be a number, got '0.1'"),
    "a switch": (
        lambda: cs.Robust(cs.Switch(cs.FedAvg(), cs.FedEP(), at=1)),
        "Robust: method must be of type Algorithm (such as FedAvg), got Switch(…)",
    ),
}


@pytest.mark.parametrize("what", WRONG_PARTS)
def test_a_part_of_another_type_is_refused_when_a_method_is_made(what: str) -> None:
    make, sentence = WRONG_PARTS[what]
    with pytest.raises(ConfigError) as caught:
        make()
    assert sentence in str(caught.value)


def test_a_method_without_settings_needs_no_decorator() -> None:
    class Plain(cs.Algorithm):
        def start(self, task: cs.Task, info: cs.data.Info) -> cs.Point:
            return cs.Point(info.initial)

        def local(self, task: cs.Task, message: Any, state: Any, cohort: cs.data.Cohort) -> Any:
            return cs.Weighted.of(cs.Point(TRAIN(task, message.theta, cohort)), cohort.n), None

        def fuse(self, server: Any, update: Any) -> Any:
            return update.mean

        def posterior(self, server: Any) -> Any:
            return server

    assert bool(fit(Plain(), *linear()).posterior.mean.any())


def test_numbers_may_be_of_any_kind() -> None:
    assert cs.FedProx(cs.SGD(lr=1, epochs=np.int64(2)), mu=np.float32(0.5)).mu == 0.5


WRONG_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a class": (
        {"algorithm": cs.FedAvg},
        "algorithm must be of type Algorithm (such as FedAvg) or of type Switch",
    ),
    "a class in a switch": (
        {"algorithm": cs.Switch(cs.FedAvg, cs.FedEP(), at=1)},
        "Switch: first must be of type Algor",
    ),
    "a module": ({"task": nn.Linear(3, 1)}, "task must be of type Task, got Linear(…)"),
    "a data set": ({"federation": linear()[1].data}, "federation must be of type Federation, got Dataset(…)"),
    "a tensor": ({"test": torch.zeros(3)}, "test must be of type Dataset or of type Federation or None, got Tensor(…)"),
    "half a round": ({"rounds": 1.5}, "rounds must be a whole number, got 1.5"),
    "a device": ({"engine": "cuda"}, "engine must be an engine, such as Simulator(device='cuda'), got 'cuda'"),
    "an engine's class": ({"engine": cs.Simulator}, "engine must be an engine"),
    "a long seed": ({"seed": 2**63}, "seed must lie in -2**63 … 2**63 - 1, got 9223372036854775808"),
}


@pytest.mark.parametrize("what", WRONG_ARGUMENTS)
def test_an_argument_of_another_type_is_refused(what: str) -> None:
    wrong, sentence = WRONG_ARGUMENTS[what]
    task, federation = linear()
    given: dict[str, Any] = {"algorithm": cs.FedAvg(), "task": task, "federation": federation} | wrong
    with pytest.raises(ConfigError) as caught:
        fit(**given)
    assert sentence in str(caught.value)


def test_a_cohort_larger_than_the_federation_is_refused() -> None:
    task, federation = linear()
    with pytest.raises(ConfigError, match="cohort is 6, but the federation has 5 clients"):
        fit(cs.FedAvg(), task, federation, cohort=6)


def test_a_client_without_data_is_refused_by_name(tmp_path: Path) -> None:
    task, federation = linear(sizes=(3, 0, 2, 1, 0))
    with pytest.raises(DataError, match="2 of 5 clients have no data, among them 'Bern', 'Zug'"):
        fit(cs.FedAvg(), task, federation, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_labels_outside_the_models_classes_are_refused_in_training_and_test_data() -> None:
    _, train, test = blobs()
    task = cs.Classification(nn.Linear(2, 2))
    with pytest.raises(DataError, match=r"labels lie in 0\.\.2, but the module has 2 outputs"):
        fit(cs.FedAvg(), task, train)
    mended = replace(train, data=replace(train.data, y=train.data.y.clamp_max(1)))
    with pytest.raises(DataError, match=r"labels lie in 0\.\.2, but the module has 2 outputs"):
        fit(cs.FedAvg(), task, mended, test=test)


def test_a_held_out_share_that_leaves_nobody_a_test_example_is_refused() -> None:
    task, federation = linear(sizes=(3, 3), names=None)
    train, test = federation.split(0.1)
    with pytest.raises(DataError, match="none of the 2 clients has any test data"):
        fit(cs.FedAvg(), task, train, test=test)


def test_states_that_outgrow_memory_need_a_directory() -> None:
    task, federation = linear()
    with pytest.raises(ConfigError, match=r"more than state_memory .*: pass out="):
        fit(cs.LocalOnly(TRAIN), task, federation, state_memory=len(SIZES) * PARAMETERS * 4 - 1)
    fit(cs.LocalOnly(TRAIN), task, federation, state_memory=len(SIZES) * PARAMETERS * 4)


def test_resume_without_a_directory_is_refused() -> None:
    task, federation = linear()
    with pytest.raises(ConfigError, match="pass out="):
        fit(cs.FedAvg(), task, federation, resume=True)


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


# Resuming


RUNS = {
    "FedAvg": (cs.FedAvg(TRAIN, server=cs.server.Momentum(momentum=0.9)), {}),
    "FedAvg, Adam, a cohort of two": (cs.FedAvg(TRAIN, server=cs.server.Adam()), {"cohort": 2}),
    "LocalOnly in memory": (cs.LocalOnly(TRAIN), {"cohort": 3}),
    "LocalOnly on disk": (cs.LocalOnly(TRAIN), {"cohort": 3, "state_memory": 0}),
    "LocalOnly on disk, forked": (cs.LocalOnly(TRAIN), {"cohort": 3, "state_memory": 0, "engine": FORKED}),
}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", RUNS)
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path: Path, name: str, every: int) -> None:
    task, federation = linear()
    algorithm, options = RUNS[name]
    options = {"rounds": 8, "test": federation, "checkpoint_every": every, **options}
    whole = fit(algorithm, task, federation, out=tmp_path / "whole", **options)
    for at in (1, 5, 6):
        with pytest.raises(Power):
            fit(algorithm, task, federation, out=tmp_path / "parts", resume=True, callbacks=[cut(at)], **options)
    resumed = fit(algorithm, task, federation, out=tmp_path / "parts", resume=True, **options)
    assert_same_run(whole, resumed)
    assert read_lines(tmp_path / "parts") == resumed.history
    one, other = (cs.core.unpack(checkpoints(tmp_path / which)[0].read_bytes()) for which in ("whole", "parts"))
    assert_same(one, other)
    whole_scores, parts_scores = ((tmp_path / w / "evaluation.json").read_bytes() for w in ("whole", "parts"))
    assert whole_scores == parts_scores


def test_states_on_disk_are_those_in_memory_and_old_files_go(tmp_path: Path) -> None:
    task, federation = linear()
    memory = fit(cs.LocalOnly(TRAIN), task, federation, rounds=6)
    disk = fit(cs.LocalOnly(TRAIN), task, federation, rounds=6, out=tmp_path / "run", state_memory=0)
    assert_same_run(memory, disk)
    names = {path.name for path in (tmp_path / "run" / "states").iterdir()}
    assert names == {f"{client}-{round}.safetensors" for client in range(len(SIZES)) for round in (5, 6)}


@pytest.mark.parametrize(("first", "then", "place"), [(0, 1 << 20, "files"), (1 << 20, 0, "memory")])
def test_a_run_keeps_states_where_it_began_to(tmp_path: Path, first: int, then: int, place: str) -> None:
    task, federation = linear()
    fit(cs.LocalOnly(TRAIN), task, federation, out=tmp_path / "run", state_memory=first)
    with pytest.raises(CheckpointError, match=f"keeps the clients' states in {place}: give state_memory as before"):
        fit(cs.LocalOnly(TRAIN), task, federation, rounds=6, out=tmp_path / "run", resume=True, state_memory=then)


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


def test_a_run_cannot_be_resumed_to_fewer_rounds_than_it_has(tmp_path: Path) -> None:
    task, federation = linear()
    fit(cs.FedAvg(TRAIN), task, federation, rounds=4, out=tmp_path / "run")
    with pytest.raises(CheckpointError, match="is at round 4 already: rounds is only 3"):
        fit(cs.FedAvg(TRAIN), task, federation, rounds=3, out=tmp_path / "run", resume=True)


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
    "method": (
        r"algorithm\.name is 'FedAvg' there and 'FedProx' here",
        lambda a, t, f: (cs.FedProx(TRAIN), t, f, {}),
    ),
    "server": (
        r"algorithm\.server\.name is 'Momentum' there and 'Adam' here",
        lambda a, t, f: (cs.FedAvg(TRAIN, server=cs.server.Adam()), t, f, {}),
    ),
    "seed": (r"seed is 0 there and 1 here", lambda a, t, f: (a, t, f, {"seed": 1})),
    "cohort": (r"cohort is 5 there and 2 here", lambda a, t, f: (a, t, f, {"cohort": 2})),
    "partition": (
        r"federation\.partition is \d+ there and \d+ here",
        lambda a, t, f: (a, t, another_partition(f), {}),
    ),
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


@pytest.mark.parametrize("what", OTHERS)
def test_another_run_is_not_resumed_and_the_difference_is_named(tmp_path: Path, what: str) -> None:
    task, federation = linear()
    algorithm = cs.FedAvg(TRAIN)
    fit(algorithm, task, federation, out=tmp_path / "run")
    before = files(tmp_path)
    sentence, change = OTHERS[what]
    algorithm, task, federation, options = change(algorithm, task, federation)
    with pytest.raises(CheckpointError, match=sentence):
        fit(algorithm, task, federation, rounds=6, out=tmp_path / "run", resume=True, **options)
    assert files(tmp_path) == before


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
    task, federation = linear(sizes=(1500, 1500), names=None)
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


@pytest.mark.parametrize("name", ["FedAvg", "LocalOnly in memory", "LocalOnly on disk"])
@pytest.mark.parametrize("keep", [0, 7, 100])
def test_a_truncated_checkpoint_is_set_aside_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, keep: int
) -> None:
    task, federation = linear()
    algorithm, options = RUNS[name]
    whole = fit(algorithm, task, federation, rounds=9, out=tmp_path / "whole", **options)
    run = tmp_path / "run"
    fit(algorithm, task, federation, rounds=6, checkpoint_every=2, out=run, **options)
    newest, before = checkpoints(run)
    newest.write_bytes(newest.read_bytes()[:keep])
    with caplog.at_level(logging.WARNING, "consilience"):
        resumed = fit(algorithm, task, federation, rounds=9, out=run, resume=True, **options)
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


def test_a_run_does_not_go_into_a_comparisons_directory(tmp_path: Path) -> None:
    task, federation = linear()
    compare([cs.FedAvg(TRAIN)], Setting(task, federation, federation), seeds=1, out=tmp_path, **COMPARED)
    before = files(tmp_path)
    for resume in (False, True):
        with pytest.raises(CheckpointError, match="holds a comparison: choose another directory"):
            fit(cs.FedAvg(TRAIN), task, federation, out=tmp_path, resume=resume)
    assert files(tmp_path) == before


def test_a_run_json_that_is_no_json_is_named(tmp_path: Path) -> None:
    task, federation = linear()
    fit(cs.FedAvg(TRAIN), task, federation, out=tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not a run directory"):
        fit(cs.FedAvg(TRAIN), task, federation, out=tmp_path / "run", resume=True)


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


# Bad clients


@cs.algorithm
class Tampered(cs.Algorithm):
    """LocalOnly, but something happens to the clients `victims` from round `since` on."""

    victims: tuple[int, ...] = (3,)
    since: int = 2
    what: str = "nan"
    inner: cs.LocalOnly = cs.LocalOnly(TRAIN)

    def start(self, task: cs.Task, info: cs.data.Info) -> cs.Point:
        return self.inner.start(task, info)

    def client(self, task: cs.Task, info: cs.data.Info, n: Tensor) -> cs.Point:
        return self.inner.client(task, info, n)

    def local(self, task: cs.Task, message: Any, state: Any, cohort: cs.data.Cohort) -> Any:
        update, new = self.inner.local(task, message, state, cohort)
        hit = torch.isin(cohort.ids, torch.tensor(self.victims)) & (cohort.round >= self.since)
        if self.what == "raise" and bool(hit.any()):
            raise ZeroDivisionError("no beds left")
        bad = float(self.what) if self.what != "raise" else 0.0
        poison = torch.where(hit, bad, 0.0).unsqueeze(1)
        return tree_map(lambda leaf: leaf + poison, update), new

    def fuse(self, server: Any, update: Any) -> cs.Point:
        return self.inner.fuse(server, update)

    def posterior(self, server: cs.Point) -> cs.Point:
        return server

    def personal(self, server: cs.Point, state: cs.Point) -> cs.Point:
        return state


@pytest.mark.parametrize("engine", [HERE, FORKED, replace(HERE, chunk=1)], ids=["batched", "forked", "one by one"])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_client_with_an_update_that_is_not_finite_is_left_out_and_named(
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


def test_a_client_whose_own_data_blow_up_is_left_out() -> None:
    task, federation = linear()
    x = federation.data.x.clone()
    x[federation.indices(1)] *= 1e25
    wild = replace(federation, data=replace(federation.data, x=x))
    run = fit(cs.FedAvg(cs.SGD(lr=0.1, batch_size=1)), task, wild, rounds=2)
    assert [[r["client"] for r in line["rejected"]] for line in run.history] == [["Bern"], ["Bern"]]
    assert bool(run.posterior.mean.isfinite().all())
    assert not torch.equal(run.posterior.mean, torch.zeros(PARAMETERS))


EVERYBODY = (0, 1, 2, 3, 4)


@pytest.mark.parametrize("engine", [HERE, FORKED], ids=["here", "forked"])
def test_a_round_that_rejects_everybody_keeps_the_model_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, engine: cs.Simulator
) -> None:
    task, federation = linear()
    run = fit(Tampered(victims=EVERYBODY), task, federation, engine=engine, out=tmp_path / "run", test=federation)
    once = fit(Tampered(), task, federation, rounds=1, engine=engine)
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
    @cs.algorithm
    class Late(Tampered):
        def local(self, task: cs.Task, message: Any, state: Any, cohort: cs.data.Cohort) -> Any:
            update, new = self.inner.local(task, message, state, cohort)
            return tree_map(lambda leaf: leaf * (torch.nan if cohort.round <= 2 else 1), update), new

    task, federation = linear()
    with pytest.raises(cs.ConsilienceError, match=NOTHING_LEARNED):
        fit(Late(), task, federation, rounds=2, out=tmp_path / "run")
    run = fit(Late(), task, federation, rounds=3, out=tmp_path / "run", resume=True)
    assert [line["clients"] for line in run.history] == [0, 0, 5]


def test_the_second_method_of_a_switch_must_learn_too() -> None:
    task, federation = linear()
    method = cs.Switch(cs.FedAvg(TRAIN), Tampered(victims=EVERYBODY), at=2)
    with pytest.raises(cs.ConsilienceError, match=f"Tampered: {NOTHING_LEARNED}"):
        fit(method, task, federation)


def test_a_server_that_is_not_finite_is_named_and_not_its_clients(caplog: pytest.LogCaptureFixture) -> None:
    @cs.algorithm
    class Bursting(Tampered):
        def fuse(self, server: Any, update: Any) -> cs.Point:
            return cs.Point(server.theta + torch.inf)

        def local(self, task: cs.Task, message: Any, state: Any, cohort: cs.data.Cohort) -> Any:
            update, new = self.inner.local(task, message, state, cohort)
            return tree_map(lambda leaf: leaf + message.theta.sum(), update), new

    task, federation = linear()
    run = fit(Bursting(victims=()), task, federation)
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


@pytest.mark.parametrize("engine", [None, HERE, FORKED], ids=["chosen", "here", "forked"])
@pytest.mark.parametrize("what", ["update's total.theta", "new state's theta"])
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


# Modules that can only be computed for one client at a time


class Branching(nn.Module):
    """Which way a batch goes depends on its numbers, and vmap cannot go both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if out.sum() > 0 else 2 * out


def test_where_several_clients_cannot_be_computed_at_once_they_are_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task, federation = cs.Regression(Branching()), linear()[1]
    run = fit(cs.FedAvg(TRAIN), task, federation, engine=cs.Simulator(device="cpu"))
    assert run.plan is not None
    assert run.plan.chunk == 1
    assert "several at once failed with RuntimeError: vmap" in run.plan.why
    assert "clients are computed one by one, which may be slower: several at once failed with" in caplog.text
    alone = fit(cs.FedAvg(TRAIN), task, federation, engine=cs.Simulator(device="cpu", chunk=1, workers=1))
    torch.testing.assert_close(run.posterior.mean, alone.posterior.mean)


def test_they_are_one_by_one_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would be asked, on a CPU."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    (task, federation), algorithm = (cs.Regression(Branching()), linear()[1]), cs.FedAvg(TRAIN)
    with cs.Simulator(device="cpu").open(algorithm, task, federation, seed=0, cohort=5, rounds=1) as session:
        numbers = (torch.tensor(n) for n in (0, 5, federation.examples))
        server = algorithm.start(session.task, cs.data.Info(task.initial(), *numbers))
        plan = session.autotuner(1).choose_on_gpu(
            server, InMemory(lambda ids: None), federation.sizes.argsort(descending=True)
        )
    assert plan.chunk == 1
    assert plan.why.startswith("several at once failed with RuntimeError: vmap")


@pytest.mark.parametrize("engine", [HERE, FORKED], ids=["here", "forked"])
def test_who_wanted_several_at_once_is_told_to_take_one(engine: cs.Simulator) -> None:
    with pytest.raises(cs.core.errors.ClientError, match=r"RuntimeError: vmap: .* at once: set chunk = 1$"):
        fit(cs.FedAvg(TRAIN), cs.Regression(Branching()), linear()[1], engine=engine)


def test_gradients_of_single_examples_cannot_be_taken_of_every_layer() -> None:
    with pytest.raises(
        cs.core.errors.ClientError, match="this method needs gradients of single examples, or second derivatives"
    ):
        fit(cs.algorithms.FedLA(TRAIN), cs.Regression(Branching()), linear()[1], engine=cs.Simulator(device="cpu"))


# Comparing


def test_two_methods_of_one_name_are_refused_rather_than_one_forgotten() -> None:
    task, federation = linear()
    setting = Setting(task, federation, federation)
    methods = [cs.FedAvg(TRAIN), cs.FedAvg(TRAIN, server=cs.server.Adam())]
    with pytest.raises(ConfigError, match="two methods are called 'FedAvg': pass a mapping"):
        compare(methods, setting, seeds=1, rounds=1, engine=HERE)
    labelled = dict(zip(["FedAvg", "FedAdam"], methods, strict=True))
    result = compare(labelled, setting, seeds=1, rounds=1, engine=HERE, progress=False)
    assert {row.method for row in result.rows} == {"FedAvg", "FedAdam"}


def test_every_seed_has_its_own_setting_and_all_methods_share_it() -> None:
    asked: list[int] = []

    def setting(seed: int) -> Setting:
        asked.append(seed)
        task, federation = linear(seed=seed)
        return Setting(task, federation, federation)

    methods = {"one": cs.FedAvg(TRAIN), "same": cs.FedAvg(TRAIN)}
    result = compare(methods, setting, seeds=3, rounds=1, engine=HERE, progress=False)
    assert asked == [0, 1, 2]
    scores = {(row.method, row.metric): (row.mean, row.std) for row in result.rows}
    assert scores["one", "mse"] == scores["same", "mse"]
    assert scores["one", "mse"][1] > 0
    by_client = {(entry["method"], entry["client"]) for entry in result.per_client}
    assert by_client == {(method, client) for method in methods for client in NAMES}


# What the final model does not know


def strangers() -> cs.Dataset:
    """Points far from all clouds."""
    x = 5 + torch.randn(30, 2, generator=torch.Generator().manual_seed(1))
    return cs.Dataset(x, torch.zeros(30), name="strangers")


def test_examples_of_another_kind_are_looked_at_in_the_last_evaluation_only(tmp_path: Path) -> None:
    task, train, test = blobs()
    run = fit(cs.FedAvg(TRAIN), task, train, test=test, outside=strangers(), out=tmp_path / "run", evaluate_every=1)
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert found == run.evaluate(test, outside=strangers()).to_json()
    assert found["outside"] == "strangers"
    assert sum(found["point"]["entropy"]["outside"]["count"]) == 30
    assert "posterior" not in found
    plain = fit(cs.FedAvg(TRAIN), task, train, test=test, out=tmp_path / "plain", evaluate_every=1)
    assert timeless(run.history) == timeless(plain.history)


def test_a_finished_run_can_be_asked_about_them_later(tmp_path: Path) -> None:
    task, train, test = blobs()
    fit(cs.FedAvg(TRAIN), task, train, test=test, out=tmp_path)
    fit(cs.FedAvg(TRAIN), task, train, test=test, outside=strangers(), out=tmp_path, resume=True)
    assert json.loads((tmp_path / "evaluation.json").read_text())["outside"] == "strangers"


@pytest.mark.parametrize(
    "infer", [cs.inference.Identity(TRAIN), cs.inference.Laplace(TRAIN)], ids=["scalar", "diagonal"]
)
def test_a_posterior_s_weights_are_summarised_at_the_end(tmp_path: Path, infer: cs.inference.Tilted) -> None:
    task, train, test = blobs()
    run = fit(cs.FedEP(infer), task, train, test=test, out=tmp_path)
    found = json.loads((tmp_path / "evaluation.json").read_text())["posterior"]
    assert found["weights"] == task.size
    assert [tensor["name"] for tensor in found["tensors"]] == task.main.names
    assert found["examples"][0]["mean"] == pytest.approx(run.posterior.mean[0].item())


def test_examples_of_another_kind_must_suit_the_network_and_need_test_data() -> None:
    task, train, test = blobs()
    with pytest.raises(ConfigError, match="pass test= as well"):
        fit(cs.FedAvg(TRAIN), task, train, outside=strangers())
    with pytest.raises(DataError, match="strangers"):
        fit(cs.FedAvg(TRAIN), task, train, test=test, outside=replace(strangers(), x=torch.zeros(30, 3)))


def test_a_config_names_the_data_set_of_another_kind(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    text = '[data]\nname = "digits"\n[partition]\nname = "iid"\nclients = 2\n[model]\nname = "mlp"\n[run]\nrounds = 1\n'
    config.write_text(text)
    assert read_config(config).outside() is None
    outside = read_config(config, ["run.outside=digits"]).outside()
    assert outside is not None
    assert torch.equal(outside.x, cs.load("digits").test.x)
    (tmp_path / "own.py").write_text(
        "import consilience as cs, torch\n"
        "part = cs.Dataset(torch.zeros(3, 64), torch.zeros(3), name='mine')\n"
        "def load():\n    return cs.Data(part, part)\n"
    )
    own = read_config(config, ["run.outside=own.py:load"])
    assert getattr(own.outside(), "name", None) == "mine"
    assert own.as_table()["run"]["outside"] == f"{tmp_path.resolve()}/own.py:load"
    with pytest.raises(ConfigError, match=r"run\.outside: .*digits"):
        read_config(config, ["run.outside=digit"]).outside()
