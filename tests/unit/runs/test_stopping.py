"""Validation chooses the round that a run ends with, also of a run that was interrupted anywhere."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import CheckpointError, ConfigError, DataError
from consilience.runs.directory import RunDirectory
from consilience.runs.stopping import Stopping
from support.runs import HERE, Power, assert_same, assert_same_run, checkpoints, cut, files, fit, timeless
from support.scenarios import linear
from support.sealed import content

OPTIONS: dict[str, Any] = {"rounds": 30, "evaluate_every": 1, "validation": 0.25, "patience": 4, "checkpoint_every": 7}
METHODS = {
    "FedAvg": cs.FedAvg(cs.SGD(lr=0.3, batch_size=4, epochs=4)),
    "LocalOnly": cs.LocalOnly(cs.SGD(lr=0.3, batch_size=4, epochs=4)),
}


def overfitting() -> tuple[cs.Classification, cs.Federation]:
    """Three clients with random labels and many features: the validation loss soon rises."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(120, 30, generator=generator)
    y = (x[:, 0] + 2 * torch.randn(120, generator=generator) > 0).long()
    torch.manual_seed(0)
    data = cs.Dataset(x, y, name="noise")
    return cs.Classification(nn.Linear(30, 2)), cs.Federation.from_owner(data, torch.arange(120) % 3)


def rule(patience: int | None = 2, since: int = 0) -> Stopping:
    return Stopping("nll", patience, since, {})


def history(*scores: float) -> list[dict[str, Any]]:
    return [{"round": number, "validation": {"nll": score}} for number, score in enumerate(scores, 1)]


# The rule


def test_the_best_round_is_the_first_with_the_best_score() -> None:
    assert rule().best(history(3.0, 1.0, 2.0, 1.0)) == 2


def test_the_rule_ends_a_run_after_so_many_evaluations_without_a_better_score() -> None:
    scores = history(3.0, 1.0, 2.0, 1.0)
    assert [rule().is_over(scores[:n]) for n in range(5)] == [False, False, False, False, True]
    assert not rule(patience=None).is_over(scores)


def test_a_score_that_is_not_finite_is_never_the_best() -> None:
    assert rule().best(history(float("nan"), 2.0, float("-inf"))) == 2
    assert rule().best(history(float("nan"))) is None


def test_rounds_of_an_earlier_method_do_not_count() -> None:
    assert rule(since=2).best(history(1.0, 1.0, 3.0, 2.0)) == 4


def test_more_is_better_for_an_accuracy() -> None:
    scores = [{"round": n, "validation": {"accuracy": a}} for n, a in enumerate((0.5, 0.7, 0.6), 1)]
    assert Stopping("accuracy", None, 0, {}).best(scores) == 2


# Runs


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "in memory"])
def test_a_run_ends_with_the_state_after_its_best_round(tmp_path: Path, stored: bool) -> None:
    task, federation = overfitting()
    run = fit(METHODS["FedAvg"], task, federation, **OPTIONS, out=tmp_path / "run" if stored else None)
    losses = [line["validation"]["nll"] for line in run.history]
    assert run.best_round == losses.index(min(losses)) + 1
    assert run.best_round + 4 == len(run.history) < 30
    train, held = federation.split(0.25)
    until = fit(METHODS["FedAvg"], task, train, rounds=run.best_round)
    assert_same(run.server, until.server)
    assert run.evaluate(held).point["nll"] == min(losses)
    if stored:
        assert torch.equal(cs.load_posterior(tmp_path / "run").mean, until.posterior.mean)


def test_without_patience_all_rounds_are_run_and_the_best_is_kept() -> None:
    run = fit(METHODS["FedAvg"], *overfitting(), **OPTIONS | {"patience": None, "rounds": 12})
    assert len(run.history) == 12
    assert run.best_round is not None
    assert run.best_round < 12


def test_validation_examples_are_no_training_examples() -> None:
    task, federation = overfitting()
    run = fit(METHODS["FedAvg"], task, federation, **OPTIONS | {"rounds": 1})
    train, held = federation.split(0.25)
    assert torch.equal(run.federation.order, train.order)
    assert not bool(torch.isin(run.federation.order, held.order).any())
    with pytest.raises(DataError, match="the validation examples are training examples too"):
        fit(METHODS["FedAvg"], task, federation, validation=federation)


@pytest.mark.parametrize("kind", ["Federation", "Dataset"])
def test_validation_data_may_be_given(kind: str) -> None:
    task, federation = overfitting()
    train, held = federation.split(0.25)
    data = held if kind == "Federation" else held.data[held.order]
    given = fit(METHODS["FedAvg"], task, train, **OPTIONS | {"validation": data})
    assert given.best_round == fit(METHODS["FedAvg"], task, federation, **OPTIONS).best_round


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("memory", [1 << 30, 0], ids=["states in memory", "states in files"])
def test_a_run_that_is_cut_anywhere_ends_as_if_it_had_not_been(tmp_path: Path, method: str, memory: int) -> None:
    task, federation = overfitting()
    options = {**OPTIONS, "test": federation.split(0.25)[1], "state_memory": memory, "intervals": 0.9}
    whole = fit(METHODS[method], task, federation, out=tmp_path / "whole", **options)
    assert whole.best_round is not None
    last = len(whole.history)
    for at in (1, whole.best_round, whole.best_round + 1, last - 1, last):
        parts = {"out": tmp_path / "parts", "callbacks": [cut(at)], "resume": True}
        with pytest.raises(Power):
            fit(METHODS[method], task, federation, **options, **parts)
    resumed = fit(METHODS[method], task, federation, out=tmp_path / "parts", resume=True, **options)
    assert_same_run(whole, resumed)
    assert resumed.best_round == whole.best_round
    one, other = (content(tmp_path / which / "evaluation.json") for which in ("whole", "parts"))
    assert one == other
    beliefs = [cs.load_posterior(tmp_path / which).mean for which in ("whole", "parts")]
    assert torch.equal(*beliefs)


def test_a_stopped_run_that_is_resumed_is_read_and_not_run(tmp_path: Path) -> None:
    task, federation = overfitting()
    done = fit(METHODS["FedAvg"], task, federation, out=tmp_path, test=federation, **OPTIONS)
    before = files(tmp_path)
    more = {**OPTIONS, "rounds": 50, "callbacks": [cut(len(done.history) + 1)]}
    again = fit(METHODS["FedAvg"], task, federation, out=tmp_path, test=federation, resume=True, **more)
    assert_same_run(done, again)
    after = files(tmp_path)
    assert {name for name in after if before[name] != after[name]} <= {str(tmp_path / "run.json")}


@pytest.mark.slow
def test_more_rounds_go_on_from_the_last_round_and_not_from_the_best(tmp_path: Path) -> None:
    task, federation = overfitting()
    options = {**OPTIONS, "patience": None}
    fit(METHODS["FedAvg"], task, federation, out=tmp_path / "parts", **options | {"rounds": 12})
    parts = fit(METHODS["FedAvg"], task, federation, out=tmp_path / "parts", **options | {"rounds": 15}, resume=True)
    whole = fit(METHODS["FedAvg"], task, federation, **options | {"rounds": 15})
    assert timeless(parts.history) == timeless(whole.history)
    assert_same(parts.server, whole.server)


def test_the_best_round_of_each_kept_checkpoint_is_kept(tmp_path: Path) -> None:
    task, federation = overfitting()
    run = fit(METHODS["LocalOnly"], task, federation, out=tmp_path, **OPTIONS | {"checkpoint_every": 1})
    rounds = [int(path.stem.removeprefix("round-")) for path in checkpoints(tmp_path)]
    assert rounds == [len(run.history), len(run.history) - 1, run.best_round]


def test_a_run_can_be_rewound_to_before_its_best_round(tmp_path: Path) -> None:
    task, federation = overfitting()
    options = {**OPTIONS, "checkpoint_every": 1, "keep_checkpoints": 30}
    whole = fit(METHODS["FedAvg"], task, federation, out=tmp_path, **options)
    RunDirectory(tmp_path).rewind(2)
    assert_same_run(whole, fit(METHODS["FedAvg"], task, federation, out=tmp_path, resume=True, **options))


def test_a_damaged_checkpoint_of_the_best_round_is_named(tmp_path: Path) -> None:
    task, federation = overfitting()
    run = fit(METHODS["FedAvg"], task, federation, out=tmp_path, **OPTIONS)
    best = tmp_path / "checkpoints" / f"round-{run.best_round:07d}.safetensors"
    best.write_bytes(best.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="of the best round, cannot be read"):
        fit(METHODS["FedAvg"], task, federation, out=tmp_path, resume=True, **OPTIONS)


def test_a_run_is_resumed_with_the_same_rule_and_examples_only(tmp_path: Path) -> None:
    task, federation = overfitting()
    fit(METHODS["FedAvg"], task, federation, out=tmp_path, **OPTIONS)
    with pytest.raises(CheckpointError, match=r"validation\.patience is 4 there and 5 here"):
        fit(METHODS["FedAvg"], task, federation, out=tmp_path, resume=True, **OPTIONS | {"patience": 5})
    with pytest.raises(CheckpointError, match=r"federation\.examples is 90 there and 96 here"):
        fit(METHODS["FedAvg"], task, federation, out=tmp_path, resume=True, **OPTIONS | {"validation": 0.2})


def test_validation_counts_for_the_last_method_of_a_switch() -> None:
    switch = cs.Switch(METHODS["FedAvg"], cs.FedProx(cs.SGD(lr=0.3, batch_size=4, epochs=4)), at=6)
    run = fit(switch, *overfitting(), **OPTIONS)
    assert run.best_round is not None
    assert run.best_round > 6
    assert len(run.history) == run.best_round + 4


def test_pooled_training_stops_by_the_same_examples() -> None:
    run = fit(cs.Pooled(METHODS["FedAvg"].train), *overfitting(), **OPTIONS)
    assert run.best_round is not None
    assert run.federation.examples == 90
    assert len(run.history) == run.best_round + 4


def test_wrong_settings_get_a_sentence() -> None:
    task, federation = overfitting()
    with pytest.raises(ConfigError, match="pass validation= as well"):
        fit(METHODS["FedAvg"], task, federation, patience=3)
    with pytest.raises(ConfigError, match=r"monitor: 'nl' is no score to select by; did you mean 'nll'"):
        fit(METHODS["FedAvg"], task, federation, validation=0.2, monitor="nl")
    with pytest.raises(DataError, match="no client has a validation example"):
        fit(cs.FedAvg(), *linear(), validation=0.01)
    with pytest.raises(DataError, match="must lie between 0 and 1"):
        fit(METHODS["FedAvg"], task, federation, validation=1.5)


def test_workers_end_with_the_same_round() -> None:
    task, federation = overfitting()
    one, other = (
        cs.fit(METHODS["LocalOnly"], task, federation, progress=False, engine=engine, rounds=30, evaluate_every=1,
               validation=0.25, patience=4)
        for engine in (HERE, cs.Simulator(device="cpu", chunk=1, workers=2))
    )  # fmt: skip
    assert one.best_round == other.best_round
