"""The area under the ROC curve from counts of scores lies within its stated error of the exact one."""

import math

import pytest
import torch
from torch import Tensor

from consilience.core import pack, unpack
from consilience.metrics import ScoreCounts, classes
from consilience.metrics.histograms import EDGES


def predictions(examples: int, seed: int, scale: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = (torch.rand(examples, generator=generator) < 0.2).long()
    logit = scale * (torch.randn(examples, generator=generator) + y) - 2
    return torch.stack([1 - logit.sigmoid(), logit.sigmoid()], 1), y


@pytest.mark.parametrize("scale", [0.001, 0.05, 1.0, 5.0, 50.0])
def test_the_exact_area_lies_within_the_error(scale: float) -> None:
    for seed in range(20):
        probs, y = predictions(400, seed, scale)
        exact = float(classes.auroc(probs, y, classes.once(y)))
        area, error = ScoreCounts.of(probs, y).auroc()
        assert abs(exact - area) <= error + 1e-12


def test_the_error_is_small_for_scores_of_usual_spread() -> None:
    assert ScoreCounts.of(*predictions(2000, 0, 1.0)).auroc()[1] < 0.005


def test_scores_in_one_bin_tell_nothing() -> None:
    probs = torch.tensor([[0.2, 0.8], [0.2, 0.8]])
    assert ScoreCounts.of(probs, torch.tensor([0, 1])).auroc() == (0.5, 0.5)


def test_counts_of_clients_add_up() -> None:
    probs, y = predictions(300, 1, 1.0)
    both = ScoreCounts.of(probs[:100], y[:100]) + ScoreCounts.of(probs[100:], y[100:])
    assert torch.equal(both.counts, ScoreCounts.of(probs, y).counts)
    assert both.examples == 300


def test_balanced_accuracy_is_exact() -> None:
    probs, y = predictions(300, 2, 1.0)
    exact = float(classes.balanced_accuracy(probs, y, classes.once(y)))
    assert ScoreCounts.of(probs, y).balanced_accuracy() == pytest.approx(exact, abs=1e-12)
    assert float(EDGES[499]) == 0.5


def test_without_one_class_there_is_no_area() -> None:
    counts = ScoreCounts.of(predictions(30, 0, 1.0)[0], torch.zeros(30, dtype=torch.int64))
    assert math.isnan(counts.auroc()[0])
    assert math.isnan(counts.balanced_accuracy())


def test_certain_predictions_have_bins_too() -> None:
    probs = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    counts = ScoreCounts.of(probs, torch.tensor([0, 1]))
    assert counts.auroc() == (1.0, 0.0)
    assert torch.equal(unpack(pack(counts)).counts, counts.counts)
