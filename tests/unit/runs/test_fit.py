"""fit: the rounds, their metrics, and arguments that are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import consilience as cs
from consilience.core.errors import ConfigError, DataError
from support.runs import PARAMETERS, TRAIN, fit
from support.scenarios import NAMES, SIZES, blobs, gradient, linear


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


def test_the_users_module_is_left_alone() -> None:
    module = nn.Linear(3, 1)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    _, federation = linear()
    fit(cs.FedAvg(TRAIN), cs.Regression(module), federation)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_pooled_sees_everybodys_data_at_once() -> None:
    task, federation = linear()
    run = fit(cs.Pooled(cs.SGD(lr=0.1, batch_size=100)), task, federation, rounds=2, cohort=3, test=federation)
    theta = torch.zeros(PARAMETERS)
    for _ in range(2):
        theta = theta - 0.1 * gradient(federation.data, theta)
    torch.testing.assert_close(run.posterior.mean, theta)
    assert run.history[-1]["clients"] == 1
    assert [client["name"] for client in run.evaluate(federation).clients] == list(NAMES)


TASK, PLANE = linear()
BLOBS, CLOUDS, CLOUD_TEST = blobs()
ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a class": ({"algorithm": cs.FedAvg}, ConfigError, "algorithm must be of type Algorithm (such as "),
    "a module": ({"task": nn.Linear(3, 1)}, ConfigError, "task must be of type Task, got Linear(…)"),
    "a data set": ({"federation": PLANE.data}, ConfigError, "federation must be of type Federation, got Dataset(…)"),
    "a tensor": (
        {"test": torch.zeros(3)},
        ConfigError,
        "test must be of type Dataset or of type Federation or None, got Tensor(…)",
    ),
    "half a round": ({"rounds": 1.5}, ConfigError, "rounds must be a whole number, got 1.5"),
    "no rounds": ({"rounds": 0}, ConfigError, "rounds must be at least 1, got 0"),
    "no cohort": ({"cohort": 0}, ConfigError, "cohort must be at least 1, got 0"),
    "a large cohort": ({"cohort": 6}, ConfigError, "cohort is 6, but the federation has 5 clients"),
    "no batch": ({"eval_batch_size": 0}, ConfigError, "eval_batch_size must be at least 1, got 0"),
    "no evaluation": ({"evaluate_every": -1}, ConfigError, "evaluate_every must be at least 1, got -1"),
    "no checkpoints": ({"checkpoint_every": 0}, ConfigError, "Storage: checkpoint_every must be at least 1, got 0"),
    "a device": (
        {"engine": "cuda"},
        ConfigError,
        "engine must be an engine, such as Simulator(device='cuda'), got 'cuda'",
    ),
    "an engine's class": ({"engine": cs.Simulator}, ConfigError, "engine must be an engine"),
    "a long seed": ({"seed": 2**63}, ConfigError, "seed must lie in -2**63 … 2**63 - 1, got 9223372036854775808"),
    "resume without a directory": ({"resume": True}, ConfigError, "resume needs the run's directory: pass out="),
    "states without a directory": (
        {"algorithm": cs.LocalOnly(TRAIN), "state_memory": len(SIZES) * PARAMETERS * 4 - 1},
        ConfigError,
        "GiB): pass out= so that they can be kept in files",
    ),
    "labels": (
        {"task": cs.Classification(nn.Linear(2, 2)), "federation": CLOUDS},
        DataError,
        "labels lie in 0..2, but the module has 2 outputs",
    ),
    "test labels": (
        {
            "task": cs.Classification(nn.Linear(2, 2)),
            "federation": replace(CLOUDS, data=replace(CLOUDS.data, y=CLOUDS.data.y.clamp_max(1))),
            "test": CLOUD_TEST,
        },
        DataError,
        "labels lie in 0..2, but the module has 2 outputs",
    ),
    "an empty test": (
        {"test": linear(sizes=(3, 3), names=None)[1].split(0.1)[1]},
        DataError,
        "none of the 2 clients has any test data",
    ),
    "outside without test": ({"outside": PLANE.data}, ConfigError, "pass test= as well"),
    "outside of another shape": (
        {
            "task": BLOBS,
            "federation": CLOUDS,
            "test": CLOUD_TEST,
            "outside": cs.Dataset(torch.zeros(30, 3), torch.zeros(30), name="strangers"),
        },
        DataError,
        "strangers",
    ),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_a_wrong_argument_is_refused_by_name(what: str) -> None:
    wrong, kind, sentence = ARGUMENTS[what]
    given: dict[str, Any] = {"algorithm": cs.FedAvg(), "task": TASK, "federation": PLANE} | wrong
    with pytest.raises(kind) as caught:
        fit(**given)
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


def test_a_client_without_data_is_refused_by_name(tmp_path: Path) -> None:
    task, federation = linear(sizes=(3, 0, 2, 1, 0))
    with pytest.raises(DataError, match="2 of 5 clients have no data, among them 'Bern', 'Zug'"):
        fit(cs.FedAvg(), task, federation, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
