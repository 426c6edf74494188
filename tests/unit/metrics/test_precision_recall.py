"""Precision and recall of samples: known answers, naive loops, and bad samples."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from consilience import metrics
from consilience.core.errors import ConfigError, DataError
from support.samples import RING, clouds, examples, normal, plainly

PrecisionRecall = plainly(metrics.PrecisionRecall)


def test_names_have_the_number_of_samples():
    assert metrics.PrecisionRecall()(normal(7, 2), examples(normal(9, 2))).keys() == {"precision@7", "recall@7"}


def test_a_set_is_precise_and_complete_to_itself_and_nothing_to_a_far_one() -> None:
    x = normal(60, 3)
    assert PrecisionRecall()(x, examples(x)) == {"precision": 1.0, "recall": 1.0}
    assert PrecisionRecall()(x + 100, examples(x)) == {"precision": 0.0, "recall": 0.0}


def test_half_the_modes_are_all_precise_and_half_complete() -> None:
    real, _ = clouds(50)
    made, _ = clouds(100, RING[:4], seed=1)
    scores = PrecisionRecall()(made, examples(real))
    assert scores["precision"] > 0.9
    assert scores["recall"] == pytest.approx(0.5, abs=0.03)
    other_way = PrecisionRecall()(real, examples(made))
    assert other_way["recall"] > 0.9
    assert other_way["precision"] == pytest.approx(0.5, abs=0.03)


POINTS = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@given(made=POINTS, real=POINTS, neighbours=st.integers(1, 6))
def test_precision_and_recall_agree_with_loops_over_points(
    made: list[tuple[int, int]], real: list[tuple[int, int]], neighbours: int
) -> None:
    def covered(points: list[tuple[int, int]], by: list[tuple[int, int]]) -> float:
        def square(p: tuple[int, int], q: tuple[int, int]) -> int:
            return (p[0] - q[0]) ** 2 + (p[1] - q[1]) ** 2

        balls = []
        for i, centre in enumerate(by):
            fellows = sorted(square(centre, other) for j, other in enumerate(by) if j != i)
            balls.append((centre, fellows[min(neighbours, len(fellows)) - 1] if fellows else 0))
        return sum(any(square(p, centre) <= radius for centre, radius in balls) for p in points) / len(points)

    scores = PrecisionRecall(neighbours)(torch.tensor(made).float(), examples(torch.tensor(real).float()))
    assert scores == {"precision": covered(made, real), "recall": covered(real, made)}


def test_order_translation_and_scale_do_not_matter_to_precision_and_recall() -> None:
    real, made = normal(80, 4), 0.7 * normal(90, 4, seed=1)
    scores = PrecisionRecall()(made, examples(real))
    assert 0 < scores["recall"] < 1
    assert PrecisionRecall()(made.flip(0), examples(real.flip(0))) == scores
    assert PrecisionRecall()(made + 1000, examples(real + 1000)) == scores
    assert PrecisionRecall()(made.double() * 1e6, examples(real * 1e6)) == pytest.approx(scores, abs=0.02)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_samples_that_are_not_finite_are_bad_and_leave_the_others_alone(bad: float) -> None:
    x = normal(50, 3)
    made = torch.cat([x, torch.full((50, 3), bad)])
    made[50:, 1:] = 0
    assert PrecisionRecall()(made, examples(x)) == {"precision": 0.5, "recall": 1.0}
    assert PrecisionRecall()(made[50:], examples(x)) == {"precision": 0.0, "recall": 0.0}
    # finite samples whose features are not
    judge = PrecisionRecall(features=lambda rows: rows / (rows[:, :1] != 0).float())
    assert judge(made.nan_to_num(0, 0, 0), examples(x)) == {"precision": 0.5, "recall": 1.0}


def test_one_or_two_points_are_enough() -> None:
    one, two = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0], [1.0, 5.0]])
    assert PrecisionRecall()(one, examples(one)) == {"precision": 1.0, "recall": 1.0}
    assert PrecisionRecall()(one, examples(one + 1e-3)) == {"precision": 0.0, "recall": 0.0}
    assert PrecisionRecall()(two, examples(one)) == {"precision": 0.5, "recall": 1.0}
    assert PrecisionRecall()(one + 1, examples(two)) == {"precision": 1.0, "recall": 0.0}


def test_a_point_on_the_edge_of_a_ball_is_inside() -> None:
    step = torch.arange(1.0, 51.0)
    for far in range(10, 40):
        # the sample is |step| from the first, as is its neighbour; the mean, by which they are centred, is rounded
        real = torch.tensor([0.0, 1.0, far])[:, None] * step
        assert PrecisionRecall(neighbours=1)(-step[None], examples(real))["precision"] == 1.0


def test_balls_of_doubles_are_points_and_hold_them() -> None:
    x = normal(4, 3000)
    doubles = examples(x.repeat(3, 1))
    scores = PrecisionRecall(neighbours=2)(torch.cat([x, x + 1e-4]), doubles)
    assert scores["precision"] == 0.5


def test_only_some_real_examples_are_looked_at_evenly_spaced() -> None:
    x = torch.arange(100.0)[:, None]
    seen: list[Tensor] = []

    def look(rows: Tensor) -> Tensor:
        seen.append(rows)
        return rows

    PrecisionRecall(count=5, features=look)(x, examples(x))
    assert seen[0][:, 0].tolist() == [0, 20, 40, 60, 80]
    assert len(seen[1]) == 100


def test_distances_are_between_features_and_half_precision_will_do() -> None:
    x = normal(40, 2)
    judge = PrecisionRecall(features=lambda rows: rows[:, :1])
    far = x + torch.tensor([0.0, 100.0])
    assert judge(far, examples(x)) == {"precision": 1.0, "recall": 1.0}
    assert PrecisionRecall()(x.bfloat16(), examples(x.bfloat16().float())) == {"precision": 1.0, "recall": 1.0}


@pytest.mark.parametrize(
    ("samples", "real", "message"),
    [
        (torch.zeros(0, 2), torch.zeros(3, 2), "no samples"),
        (torch.zeros(3, 2), torch.zeros(0, 2), "no examples"),
        (torch.zeros(3, 2), torch.zeros(3, 4), "2 coordinates.* have 4"),
    ],
)
def test_sets_that_cannot_be_compared_are_refused(samples: Tensor, real: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PrecisionRecall()(samples, examples(real))


def test_no_neighbours_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        PrecisionRecall(neighbours=0)
