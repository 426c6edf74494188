"""CIFAR by the methods since 2023: which rounds are scored, and that a run that was stopped goes on."""

from dataclasses import replace

import pytest
import torch

import consilience as cs
from consilience.core.errors import CallbackError
from consilience.recipes.after2023_cifar import CURVE, QUICK, Study, final, read_curve
from consilience.runs import Run
from consilience.studies import Setting


def test_every_tenth_round_and_the_last_three_are_scored():
    assert [number for number in range(1, 26) if Study(rounds=25).is_due(number)] == [10, 20, 23, 24, 25]


def test_a_score_is_the_mean_of_the_last_three_rounds():
    curve = [
        {"round": n, "accuracy": n / 10, "nll": float(n), "ece": 0.0, "marginal": {"accuracy": 0.5, "nll": n, "ece": 0}}
        for n in (2, 3, 4, 5)
    ]
    assert final(curve) == {
        "accuracy": pytest.approx(0.4), "nll": 4.0, "ece": 0.0,
        "marginal": {"accuracy": 0.5, "nll": 4.0, "ece": 0.0},
    }  # fmt: skip
    assert final([*curve[:3], {**curve[3], "marginal": None}])["marginal"] is None


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_all_methods_but_bayesadmm_train_alike(data):
    found = Study(rounds=20, epochs=5).methods(data)
    train = found["FedAvg"].train
    assert found["FedDyn"].train == found["FedLap"].train == found["FedEP(I)"].then.infer.train == train
    assert found["FedEP(I)"].first == found["FedAvg"]
    assert found["FedEP(I)"].at == 10
    ivon = found["BayesADMM"].infer.train
    assert (ivon.epochs, ivon.batch_size, ivon.schedule) == (train.epochs, train.batch_size, train.schedule)


@pytest.fixture
def study(monkeypatch):
    """A study of random images with a linear model, so that a run takes no time."""
    torch.manual_seed(0)
    data = cs.Dataset(torch.randn(40, 6), torch.arange(40) % 2)
    at = Setting(cs.Classification(torch.nn.Linear(6, 2)), cs.partition.iid(data, 3), data)
    monkeypatch.setattr(Study, "setting", lambda self, name, seed: at)
    return replace(QUICK, rounds=6, every=1)


@pytest.mark.parametrize("method", ["FedEP(I)", "BayesADMM"])
def test_a_run_that_was_stopped_goes_on_and_keeps_its_curve(study, method, tmp_path, monkeypatch):
    whole = study.learn("cifar10", method, 0, tmp_path / "whole")
    evaluate = Run.evaluate

    def fails(run, *args, **options):
        if run.history[-1]["round"] == 4:
            raise ValueError
        return evaluate(run, *args, **options)

    monkeypatch.setattr(Run, "evaluate", fails)
    with pytest.raises(CallbackError):
        study.learn("cifar10", method, 0, tmp_path / "cut")
    assert [line["round"] for line in read_curve(tmp_path / "cut")] == [1, 2, 3]
    monkeypatch.setattr(Run, "evaluate", evaluate)
    text = (tmp_path / "cut" / CURVE).read_text()
    (tmp_path / "cut" / CURVE).write_text(text + text.splitlines()[-1] + "\n")  # a round that was run twice
    resumed = study.learn("cifar10", method, 0, tmp_path / "cut")
    assert [line["round"] for line in resumed["curve"]] == [1, 2, 3, 5, 6]
    assert resumed["curve"][-1] == whole["curve"][-1]
    assert whole["rejected"] == 0
