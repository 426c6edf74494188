"""The scores agree with torchmetrics, with hand-worked cases, and stay finite at the edges."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
import torch
import torchmetrics.functional as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from consilience import metrics
from consilience.core import text
from consilience.core.errors import DataError
from consilience.metrics import Reliability, best, bounds, rounds_to, running_means


def predictions(seed: int, n: int, classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(n, classes, generator=generator), dim=1)
    return probs, torch.randint(classes, (n,), generator=generator)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 300), classes=st.integers(2, 12))
def test_classification_agrees_with_torchmetrics(seed: int, n: int, classes: int) -> None:
    probs, y = predictions(seed, n, classes)
    scores = metrics.classification(probs, y)
    accuracy = reference.classification.multiclass_accuracy(probs, y, classes, average="micro")
    ece = reference.classification.multiclass_calibration_error(probs, y, classes, n_bins=15, norm="l1")
    assert scores["accuracy"] == pytest.approx(accuracy.item(), abs=1e-6)
    assert scores["ece"] == pytest.approx(ece.item(), abs=1e-5)
    assert scores["nll"] == pytest.approx(torch.nn.functional.nll_loss(probs.log(), y).item(), rel=1e-5)
    one_hot = torch.nn.functional.one_hot(y, classes)
    assert scores["brier"] == pytest.approx((probs - one_hot).square().sum(1).mean().item(), rel=1e-5)


def test_classification_by_hand() -> None:
    probs = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.125, 0.875]], dtype=torch.float64)
    scores = metrics.classification(probs, torch.tensor([0, 1, 0]))
    assert scores["accuracy"] == pytest.approx(1 / 3)
    assert scores["nll"] == pytest.approx(-math.log(0.75 * 0.5 * 0.125) / 3)
    assert scores["brier"] == pytest.approx((2 * 0.25**2 + 2 * 0.5**2 + 2 * 0.875**2) / 3)
    assert scores["ece"] == pytest.approx((0.25 + 0.5 + 0.875) / 3)


def test_certain_and_right_is_perfect() -> None:
    y = torch.tensor([2, 0, 1])
    scores = metrics.classification(torch.eye(3)[y], y)
    assert scores == {"accuracy": 1.0, "nll": 0.0, "ece": 0.0, "brier": 0.0}


def test_certain_and_wrong_is_finite() -> None:
    scores = metrics.classification(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    assert scores["nll"] == pytest.approx(87.3365, abs=1e-3)
    assert (scores["accuracy"], scores["ece"], scores["brier"]) == (0.0, 1.0, 2.0)


def test_half_precision_is_scored_in_float32() -> None:
    probs, y = predictions(0, 500, 5)
    half = metrics.classification(probs.bfloat16(), y)
    assert half["nll"] == pytest.approx(metrics.classification(probs, y)["nll"], rel=1e-2)


@pytest.mark.parametrize(
    ("probs", "y", "message"),
    [
        (torch.ones(2, 3) / 3, torch.tensor([0, 3]), r"0\.\.2, found 0\.\.3"),
        (torch.ones(2, 3) / 3, torch.tensor([0]), r"\[2, 3\] and \[1\]"),
        (torch.ones(0, 3), torch.zeros(0, dtype=torch.int64), "no examples"),
    ],
)
def test_bad_input_gets_a_sentence(probs: Tensor, y: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        metrics.classification(probs, y)


def test_reliability_bins_by_hand() -> None:
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.55, 0.45, 0.0], [1.0, 0.0, 0.0], [0.1, 0.9, 0.0]]).double()
    diagram = metrics.reliability(probs, torch.tensor([0, 1, 0, 1]), bins=2)
    assert diagram.edges == [0.0, 0.5, 1.0]
    assert diagram.count == [0, 4]
    assert diagram.accuracy == [0.0, 0.75]
    assert diagram.confidence[1] == pytest.approx((0.5 + 0.55 + 1.0 + 0.9) / 4)


def test_reliability_of_two_halves_adds_to_the_whole() -> None:
    probs, y = predictions(1, 400, 4)
    whole = metrics.reliability(probs, y)
    halves = metrics.reliability(probs[:150], y[:150]) + metrics.reliability(probs[150:], y[150:])
    assert halves.count == whole.count
    assert halves.accuracy == pytest.approx(whole.accuracy)
    assert halves.ece == pytest.approx(whole.ece)
    with pytest.raises(DataError, match="15 bins"):
        whole + metrics.reliability(probs, y, bins=10)


def test_reliability_survives_json() -> None:
    diagram = metrics.reliability(*predictions(2, 50, 3))
    assert Reliability(**json.loads(json.dumps(asdict(diagram)))) == diagram


def test_entropy_is_zero_when_certain_and_log_c_when_flat() -> None:
    probs = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    assert metrics.entropy(probs).tolist() == pytest.approx([0.0, math.log(4)])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(3, 100), outputs=st.integers(1, 4))
def test_regression_agrees_with_torchmetrics(seed: int, n: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mean, y, variance = torch.randn(3, n, outputs, generator=generator)
    variance = variance.exp()
    scores = metrics.regression(mean, y, variance)
    nll = torch.nn.functional.gaussian_nll_loss(mean, y, variance, full=True)
    expected = {
        "mse": reference.mean_squared_error(mean, y),
        "rmse": reference.mean_squared_error(mean, y, squared=False),
        "mae": reference.mean_absolute_error(mean, y),
        "r2": reference.r2_score(mean, y),
        "nll": nll,
    }
    assert scores == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-4, abs=1e-5)


def test_regression_without_variance_has_no_nll_and_one_example_no_r2() -> None:
    scores = metrics.regression(torch.tensor([1.0]), torch.tensor([3.0]))
    assert "nll" not in scores
    assert (scores["mse"], scores["rmse"], scores["mae"]) == (4.0, 2.0, 2.0)
    assert math.isnan(scores["r2"])


def test_regression_with_zero_variance_is_finite_and_shapes_must_agree() -> None:
    y = torch.tensor([0.0, 1.0])
    assert math.isfinite(metrics.regression(y, y, torch.tensor(0.0))["nll"])
    with pytest.raises(DataError, match="differ in shape"):
        metrics.regression(y[:, None], y)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 60), labels=st.integers(2, 9))
def test_multilabel_agrees_with_torchmetrics(seed: int, n: int, labels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(n, labels, generator=generator)
    y = (torch.rand(n, labels, generator=generator) > 0.7).long()
    scores = metrics.multilabel(probs, y.float())
    of = reference.classification
    assert scores == pytest.approx(
        {
            "precision": of.multilabel_precision(probs, y, labels, average="micro").item(),
            "recall": of.multilabel_recall(probs, y, labels, average="micro").item(),
            "micro_f1": of.multilabel_f1_score(probs, y, labels, average="micro").item(),
            "macro_f1": of.multilabel_f1_score(probs, y, labels, average="macro").item(),
            "nll": torch.nn.functional.binary_cross_entropy(probs, y.float()).item(),
        },
        rel=1e-4,
        abs=1e-6,
    )


def test_multilabel_with_nothing_set_or_predicted_is_zero_not_nan() -> None:
    scores = metrics.multilabel(torch.zeros(3, 2), torch.zeros(3, 2))
    assert scores == {"precision": 0.0, "recall": 0.0, "micro_f1": 0.0, "macro_f1": 0.0, "nll": 0.0}
    assert math.isfinite(metrics.multilabel(torch.zeros(1, 2), torch.ones(1, 2))["nll"])


def test_spread_of_one_value_is_none() -> None:
    assert metrics.spread([2.0]) == (2.0, None)
    assert metrics.spread([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))
    with pytest.raises(DataError):
        metrics.spread([])


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        *(
            (name, 1)
            for name in ("accuracy", "micro_f1", "r2", "modes", "good_share", "best classifier_score", "classes")
        ),
        *((name, -1) for name in ("nll", "Test ECE", "rmse", "fid", "classifier_distance", "test d_mse")),
        *((f"{name}@2000", 1) for name in ("recall", "classes", "class_coverage")),
        *((f"{name}@10000", -1) for name in ("fid", "fid_train")),
        ("width", 0),
    ],
)
def test_direction(metric: str, better: int) -> None:
    assert metrics.direction(metric) == better


def test_names_with_a_number_of_samples_are_written_out() -> None:
    assert (text.short("fid@10000"), text.long("fid@10000")) == (
        "FID@10000",
        "Fréchet inception distance, 10000 samples",
    )
    assert (text.short("sensitivity@0.9"), text.short("nll, m = 20")) == (
        "sensitivity at specificity 0.9",
        "NLL, m = 20",
    )
    assert text.in_order(["recall@2000", "fid@10000", "loss"]) == ["loss", "fid@10000", "recall@2000"]


def test_running_means_are_over_the_rounds_that_were_measured() -> None:
    curve = [(5, 0.2), (10, 0.4), (15, 0.9), (20, 0.7)]
    assert running_means(curve, 10) == [(10, pytest.approx(0.3)), (15, pytest.approx(0.65)), (20, pytest.approx(0.8))]
    assert best(curve, 10) == pytest.approx(0.8)
    assert best(curve, 21) is None
    assert rounds_to(curve, 0.6, 10) == 15
    assert rounds_to(curve, 0.9, 10) is None


@pytest.mark.parametrize(
    ("metric", "low", "high"),
    [
        ("accuracy", 0, 1),
        ("macro_f1 (marginal)", 0, 1),
        ("sequence_error_rate", 0, 1),
        ("label_error_rate", 0, math.inf),
        ("brier", 0, 2),
        ("rmse", 0, math.inf),
        ("bits_per_token", 0, math.inf),
        ("r2", -math.inf, 1),
        ("nll", -math.inf, math.inf),
        ("classifier_score", -math.inf, math.inf),
    ],
)
def test_a_metrics_range_follows_from_its_name(metric: str, low: float, high: float) -> None:
    assert bounds(metric) == (low, high)
