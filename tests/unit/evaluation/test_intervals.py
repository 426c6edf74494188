"""Intervals of an evaluation: overall and of each client, seeded, and paired between models."""

import math
import time
from typing import Any

import pytest
import torch
from scipy.stats import binom
from torch import nn

import consilience as cs
from consilience.core.errors import TaskError
from consilience.evaluation import intervals
from consilience.evaluation.intervals import SAMPLES, paired_difference, times
from consilience.tasks.likelihoods import Binary, Categorical, Likelihood, Normal, NormalWithVariance
from support.scenarios import linear

METRICS = ("auprc", "f1", "sensitivity@0.9")


def world(examples: int = 400, clients: int = 4, seed: int = 0) -> tuple[cs.Task, cs.Federation, cs.Point]:
    """A logistic model that is right, and test examples of clients."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.tensor([1.0, -1.0, 0.5])
    x = torch.randn(examples, 3, generator=generator)
    y = (torch.rand(examples, generator=generator) < (x @ weight - 1).sigmoid()).long()
    module = nn.Linear(3, 1)
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.fill_(-1.0)
    task = cs.Binary(module)
    return task, cs.Federation.from_owner(cs.Dataset(x, y), torch.arange(examples) % clients), cs.Point(task.initial())


@pytest.mark.slow
def test_every_score_has_an_interval_around_it_overall_and_at_each_client() -> None:
    task, test, belief = world()
    found = cs.evaluate(task, belief, test, intervals=0.95, metrics=METRICS)
    assert found.intervals.keys() == found.point.keys()
    for scores, ends in [(found.point, found.intervals), *((c["metrics"], c["intervals"]) for c in found.clients)]:
        assert all(ends[name][0] <= scores[name] <= ends[name][1] for name in scores if name != "ece")
    widths = [found.intervals[name][1] - found.intervals[name][0] for name in ("accuracy", "auroc", "nll")]
    own = [[c["intervals"][n][1] - c["intervals"][n][0] for n in ("accuracy", "auroc", "nll")] for c in found.clients]
    assert all(wide > narrow for client in own for wide, narrow in zip(client, widths, strict=True))


def test_the_scores_are_those_without_intervals() -> None:
    task, test, belief = world()
    plain, found = cs.evaluate(task, belief, test), cs.evaluate(task, belief, test, intervals=0.95)
    assert found.point == plain.point
    assert "intervals" not in plain.clients[0]
    assert "intervals" not in plain.to_json()["point"]


def test_intervals_are_the_same_every_time_and_wider_for_a_higher_level() -> None:
    task, test, belief = world()
    one, again, wide = (cs.evaluate(task, belief, test, intervals=level).intervals for level in (0.9, 0.9, 0.99))
    assert one == again
    assert all(wide[name][0] < one[name][0] < one[name][1] < wide[name][1] for name in one)


def test_a_client_of_one_class_has_no_interval_where_it_has_no_score() -> None:
    task, test, belief = world()
    data = test.data
    owner = data.y * 1
    found = cs.evaluate(task, belief, cs.Federation.from_owner(data, owner), intervals=0.95, metrics=METRICS)
    assert math.isnan(found.clients[0]["metrics"]["auroc"])
    assert found.clients[0]["intervals"].keys() == {"accuracy", "nll", "ece", "brier"}
    assert found.intervals.keys() == found.point.keys()


def test_a_posterior_average_has_intervals_of_its_own() -> None:
    task, test, belief = world()
    q = cs.Gaussian.of(belief.theta, torch.full_like(belief.theta, 50.0))
    found = cs.evaluate(task, q, test, intervals=0.95)
    assert found.marginal is not None
    assert found.marginal_intervals["nll"] != found.intervals["nll"]
    assert found.to_json()["marginal"]["intervals"] == found.marginal_intervals


@pytest.mark.slow
def test_intervals_cover_the_truth() -> None:
    """Of 300 simulated test sets; the truth is the score on very many examples."""
    task, many, belief = world(200_000, 1, seed=1)
    truth = cs.evaluate(task, belief, many.data).point
    hits = dict.fromkeys(("auroc", "accuracy", "nll", "balanced_accuracy", "brier"), 0)
    for start in range(300):
        rows = torch.arange(400 * start, 400 * (start + 1))
        ends = cs.evaluate(task, belief, many.data[rows], intervals=0.95).intervals
        for name in hits:
            hits[name] += ends[name][0] <= truth[name] <= ends[name][1]
    low, high = binom.ppf([0.001, 0.999], 300, 0.95)
    assert {name: count for name, count in hits.items() if not low <= count <= high} == {}


def test_a_thousand_samples_of_a_thousand_examples_take_well_under_a_second() -> None:
    task, test, belief = world(1000, 1)
    cs.evaluate(task, belief, test.data[:10], intervals=0.95)  # which imports
    begun = time.process_time()
    cs.evaluate(task, belief, test.data, intervals=0.95)
    assert time.process_time() - begun < 2  # a third of a second, on a machine that does nothing else


CASES: dict[str, tuple[Likelihood, Any, Any]] = {
    "classes": (Categorical(), torch.randn(30, 4).softmax(1), torch.randint(4, (30,))),
    "binary": (Binary(), torch.randn(30, 2).softmax(1), torch.randint(2, (30,)).float()),
    "numbers": (Normal(0.5), torch.randn(30, 2), torch.randn(30, 2)),
    "noisy numbers": (NormalWithVariance(), torch.rand(30, 2, 2) + 0.1, torch.randn(30, 2)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spread", [True, False])
def test_scores_of_many_samples_at_once_are_those_of_one_by_one(case: str, spread: bool) -> None:
    likelihood, prediction, y = CASES[case]
    over = torch.rand(prediction.shape) if spread and likelihood.spreads else None
    weights = times(0, 30, torch.arange(5))
    fast = likelihood.resampled(prediction, y, over, weights)
    slow = Likelihood.resampled(likelihood, prediction, y, over, weights)
    assert fast.keys() == slow.keys()
    for name in fast:
        assert fast[name].tolist() == pytest.approx(slow[name].tolist(), rel=1e-4, abs=1e-6)


def test_a_metric_of_the_user_s_own_has_an_interval() -> None:
    task, test, belief = world(100, 2)
    own = {"mean risk": lambda prediction, y: prediction[:, 1].mean()}
    low, high = cs.evaluate(task, belief, test, intervals=0.95, metrics=own).intervals["mean risk"]
    assert 0 < low < high < 1


def test_samples_depend_on_the_client_alone() -> None:
    one, other = times(3, 50, torch.arange(10)), times(3, 50, torch.arange(5, 10))
    assert torch.equal(one[5:], other)
    assert (one.sum(1) == 50).all()
    assert not torch.equal(one, times(4, 50, torch.arange(10)))


def test_differences_between_models_are_paired() -> None:
    task, test, belief = world(100, 1)
    same, worse = belief, cs.Point(belief.theta * 0.9)
    replicates = [cs.evaluate(task, q, test, intervals=0.95).replicates["0"]["nll"] for q in (same, worse)]
    assert len(replicates[0]) == SAMPLES
    low, high = paired_difference([(replicates[0], replicates[1])], 0.95) or [0.0, 0.0]
    assert high - low < float(replicates[0].std())
    assert paired_difference([(replicates[0], replicates[0])], 0.95) is None


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    task, test, belief = world(50, 2)
    whole = cs.evaluate(task, belief, test, intervals=0.95)
    monkeypatch.setattr(intervals, "AT_ONCE", 777)
    assert cs.evaluate(task, belief, test, intervals=0.95).intervals == whole.intervals


def test_what_has_no_intervals_is_refused() -> None:
    task = cs.LanguageModel(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)))
    tokens = torch.randint(5, (8, 6))
    with pytest.raises(TaskError, match="are not kept for language-model: leave intervals out"):
        cs.evaluate(task, cs.Point(task.initial()), cs.Dataset(tokens, tokens), intervals=0.95)


def test_metrics_of_classes_are_refused_for_numbers_before_the_first_round() -> None:
    task, federation = linear()
    with pytest.raises(TaskError, match="auprc and f1 are defined for classes, and the task is regression"):
        cs.fit(cs.FedAvg(), task, federation, rounds=1, metrics=("auprc", "f1"), progress=False)


def test_fit_gives_its_last_scores_intervals(tmp_path: Any) -> None:
    task, test, _ = world(100, 2)
    train, test = test.split(0.5)
    run = cs.fit(cs.FedAvg(), task, train, rounds=2, test=test, intervals=0.9, out=tmp_path, progress=False)
    stored = cs.load_run(tmp_path).evaluation
    assert stored is not None
    assert stored.intervals == run.evaluation.intervals != {}
    assert stored.level == 0.9
    assert "auroc" in stored.clients[0]["intervals"]
