"""AUROC is the probability it says it is, ties included."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor

from consilience.core.errors import DataError
from consilience.metrics import auroc

# Few distinct values, so that ties are the rule; integers, so that transforms keep the order exactly.
SCORES = st.lists(st.integers(-6, 6), min_size=1, max_size=40).map(lambda values: torch.tensor(values).double())


@settings(max_examples=50, deadline=None)
@given(inside=SCORES, outside=SCORES)
def test_auroc_is_the_share_of_pairs_in_order_and_half_of_those_tied(inside: Tensor, outside: Tensor) -> None:
    above, tied = outside[:, None] > inside, outside[:, None] == inside
    pairs = len(inside) * len(outside)
    assert auroc(inside, outside) == (int(above.sum()) + 0.5 * int(tied.sum())) / pairs


@settings(max_examples=50, deadline=None)
@given(inside=SCORES, outside=SCORES)
def test_auroc_agrees_with_scikit_learn(inside: Tensor, outside: Tensor) -> None:
    truth = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))])
    expected = roc_auc_score(truth.numpy(), torch.cat([inside, outside]).numpy())
    assert auroc(inside, outside) == pytest.approx(expected, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(inside=SCORES, outside=SCORES)
def test_auroc_is_a_probability_that_turns_around_when_the_sets_are_swapped(inside: Tensor, outside: Tensor) -> None:
    area = auroc(inside, outside)
    assert 0 <= area <= 1
    assert auroc(outside, inside) == pytest.approx(1 - area, abs=1e-12)
    assert auroc(-inside, -outside) == pytest.approx(1 - area, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(inside=SCORES, outside=SCORES, increasing=st.sampled_from([torch.exp, torch.atan, lambda s: 3 * s**3 - 7]))
def test_only_the_order_of_scores_counts(
    inside: Tensor, outside: Tensor, increasing: Callable[[Tensor], Tensor]
) -> None:
    assert auroc(increasing(inside), increasing(outside)) == auroc(inside, outside)


def test_apart_is_one_the_wrong_way_round_zero_and_all_equal_a_half() -> None:
    low, high = torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4, 0.5])
    assert (auroc(low, high), auroc(high, low), auroc(torch.ones(3), torch.ones(5))) == (1.0, 0.0, 0.5)


def test_scores_of_half_precision_are_ranked_as_they_are() -> None:
    scores = torch.tensor([1.0, 2.0]).bfloat16()
    assert auroc(scores, scores + 0.5) == 0.75


def test_many_scores_do_not_overflow() -> None:
    scores = torch.arange(100_000)
    assert auroc(scores, scores) == 0.5


@pytest.mark.parametrize(
    ("inside", "outside", "message"),
    [
        (torch.ones(0), torch.ones(2), "no scores of inside"),
        (torch.ones(2), torch.ones(0), "no scores of outside"),
        (torch.tensor([math.nan]), torch.ones(2), "inside examples are not all finite"),
        (torch.ones(2), torch.tensor([1.0, math.inf]), "outside examples are not all finite"),
    ],
)
def test_scores_that_cannot_be_ranked_get_a_sentence(inside: Tensor, outside: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        auroc(inside, outside)
