"""Metrics of classes are scikit-learn's, ties included, for many weightings at once, and nan where undefined."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor

from consilience.core.errors import ConfigError, TaskError
from consilience.metrics import as_metrics, classes, direction, named

NAMES = ("auroc", "auprc", "f1", "balanced_accuracy", "sensitivity@0.9")


def predictions(classes: int, examples: int = 300, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Probabilities on a coarse grid, so that many are equal, and labels that they tell something about."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (examples,), generator=generator)
    logits = torch.randn(examples, classes, generator=generator, dtype=torch.float64)
    logits[torch.arange(examples), y] += 1
    return (logits * 2).round().div(2).softmax(1), y


def scikit(name: str, probs: Tensor, y: Tensor) -> float:
    p, t, count = probs.numpy(), y.numpy(), probs.shape[1]
    score, average = (p[:, 1], "binary") if count == 2 else (p, "macro")
    one_hot = t if count == 2 else np.eye(count)[t]
    if name == "auroc":
        return sk.roc_auc_score(t, score, multi_class="ovr")
    if name == "auprc":
        return sk.average_precision_score(one_hot, score)
    if name == "f1":
        return sk.f1_score(t, p.argmax(1), average=average)
    if name == "balanced_accuracy":
        return sk.balanced_accuracy_score(t, p.argmax(1))
    each = [1] if count == 2 else range(count)
    curves = [sk.roc_curve(t == c, p[:, c], drop_intermediate=False)[:2] for c in each]
    return float(np.mean([hits[alarms <= 0.1 + 1e-12].max() for alarms, hits in curves]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_metric_is_that_of_scikit_learn(name: str, count: int) -> None:
    for seed in range(5):
        probs, y = predictions(count, seed=seed)
        assert named(name)(probs, y) == pytest.approx(scikit(name, probs, y), abs=1e-12)


@pytest.mark.parametrize("name", [*NAMES, "accuracy", "nll", "ece", "brier"])
@pytest.mark.parametrize("count", [2, 3])
def test_a_weight_is_a_number_of_copies(name: str, count: int) -> None:
    probs, y = predictions(count, 60)
    times = torch.randint(4, (3, 60), generator=torch.Generator().manual_seed(1))
    score = named(name).weighted if name in NAMES else getattr(classes, name)
    copies = [torch.arange(60).repeat_interleave(row) for row in times]
    alone = [score(probs[rows], y[rows], classes.once(y[rows])) for rows in copies]
    assert score(probs, y, times.double()).tolist() == pytest.approx([float(one) for one in alone], abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("only", [0, 1])
def test_a_metric_of_one_class_alone_is_not_defined(name: str, only: int) -> None:
    probs, y = predictions(2, 20)
    assert math.isnan(named(name)(probs, torch.full_like(y, only)))


@pytest.mark.parametrize("name", ["auroc", "auprc", "f1", "balanced_accuracy"])
def test_a_class_that_does_not_occur_is_left_out_of_the_mean(name: str) -> None:
    probs, y = predictions(3)
    some = y < 2
    probs, y = probs[some], y[some]
    binary = [scikit(name, torch.stack([1 - probs[:, c], probs[:, c]], 1), (y == c).long()) for c in (0, 1)]
    wanted = sk.f1_score(y.numpy(), probs.argmax(1).numpy(), average="macro", labels=[0, 1]) if name == "f1" else (
        np.mean([(probs.argmax(1) == c)[y == c].double().mean() for c in (0, 1)]) if name == "balanced_accuracy"
        else np.mean(binary))  # fmt: skip
    assert named(name)(probs, y) == pytest.approx(wanted, abs=1e-12)


def test_the_area_of_scores_that_are_not_finite_is_not_defined() -> None:
    probs, y = predictions(2, 20)
    probs[3] = math.nan
    assert math.isnan(named("auroc")(probs, y))
    assert math.isnan(named("auprc")(probs, y))


def test_a_higher_specificity_allows_less_sensitivity() -> None:
    probs, y = predictions(2)
    found = [named(f"sensitivity@{at}")(probs, y) for at in (0.5, 0.8, 0.95, 0.999)]
    assert found == sorted(found, reverse=True)
    assert named("sensitivity")(probs, y) == named("sensitivity@0.9")(probs, y)


def test_metrics_by_name_and_of_the_user_s_own_are_one_list() -> None:
    own = named("f1")
    assert [metric.name for metric in as_metrics(("auprc", own, "sensitivity@0.95"))] == [
        "auprc", "f1", "sensitivity@0.95",
    ]  # fmt: skip
    assert all(metric.direction == 1 for metric in as_metrics(NAMES))
    assert direction("sensitivity@0.9") == 1
    with pytest.raises(ConfigError, match="there is no metric 'auprcc'; did you mean 'auprc'"):
        as_metrics(["auprcc"])
    with pytest.raises(ConfigError, match="the specificity is a number between 0 and 1"):
        as_metrics(["sensitivity@90"])
    with pytest.raises(ConfigError, match="two metrics have one name"):
        as_metrics(["f1", own])
    with pytest.raises(ConfigError, match="or be a list"):
        as_metrics("f1")


def test_predictions_that_are_no_probabilities_of_classes_are_refused() -> None:
    with pytest.raises(TaskError, match=r"the metric 'f1' failed with DataError: probabilities must be \[N, C\]"):
        named("f1")(torch.ones(3), torch.ones(3))
