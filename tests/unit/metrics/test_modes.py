"""Modes and density maps: known answers, and bad samples."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from consilience.core.errors import DataError
from consilience.metrics import (
    Modes,
    density_mse,
    mixture_density,
)
from support.samples import RING, clouds, examples, normal


def test_modes_are_those_with_their_fair_share_of_good_samples() -> None:
    judge = Modes(RING, torch.full((8,), 0.1))
    nowhere = torch.zeros(1, 2)
    # 80 samples, fair share 10, of which 2 are enough: 40 at mode 0, 2 at mode 1, 1 at mode 2, the others nowhere
    made = torch.cat([RING[:1].repeat(40, 1), RING[1:2].repeat(2, 1), RING[2:3], nowhere.repeat(37, 1)])
    assert judge(made, examples(RING)) == {"modes": 2.0, "good_share": 43 / 80}
    assert judge(made[torch.randperm(80)], examples(RING)) == {"modes": 2.0, "good_share": 43 / 80}
    assert replace(judge, least=0.21)(made, examples(RING))["modes"] == 1.0


def test_good_is_within_reach_of_the_nearest_centre_by_its_own_deviation() -> None:
    judge = Modes(torch.tensor([[0.0, 0.0], [10.0, 0.0]]), torch.tensor([1.0, 2.0]))
    made = torch.tensor([[-2.99, 0.0], [-3.01, 0.0], [10.0, 5.99], [10.0, 6.01], [5.0, 0.0], [4.0, 0.0]])
    # (5, 0) is a tie, six deviations of either at least
    assert judge(made, examples(made))["good_share"] == pytest.approx(2 / 6)
    assert replace(judge, reach=10.0)(made, examples(made))["good_share"] == 1.0


def test_modes_of_labelled_clouds_find_them_and_miss_what_is_dropped() -> None:
    x, y = clouds(200)
    judge = Modes.of(examples(x, y * 3))  # labels need not be 0..C−1
    assert judge.centres.shape == (8, 2)
    torch.testing.assert_close(judge.centres, RING, atol=0.03, rtol=0)
    torch.testing.assert_close(judge.deviations, torch.full((8,), 0.1), atol=0.01, rtol=0)
    fresh, labels = clouds(200, seed=1)
    scores = judge(fresh, examples(x))
    assert scores["modes"] == 8.0
    # within three deviations in the plane: 1 − exp(−9/2) = 0.989
    assert scores["good_share"] == pytest.approx(0.989, abs=0.01)
    assert judge(fresh[labels < 5], examples(x))["modes"] == 5.0
    moved = Modes.of(examples(x + 50, y))
    assert moved(fresh + 50, examples(x)) == pytest.approx(scores, abs=2e-3)


def test_the_deviation_is_per_coordinate() -> None:
    x = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0], [7.0, 7.0, 7.0]])
    judge = Modes.of(examples(x, torch.tensor([0, 0, 1])))
    assert judge.deviations.tolist() == [1.0, 0.0]
    assert judge.centres.tolist() == [[0.0] * 3, [7.0] * 3]


def test_modes_count_what_is_not_finite_as_bad() -> None:
    judge = Modes(RING, torch.full((8,), 0.1))
    made = torch.cat([RING, torch.full((4, 2), math.nan), torch.full((4, 2), math.inf)])
    assert judge(made, examples(RING)) == {"modes": 8.0, "good_share": 0.5}
    assert judge(made[8:], examples(RING)) == {"modes": 0.0, "good_share": 0.0}
    assert judge(RING[:1], examples(RING)) == {"modes": 1.0, "good_share": 1.0}


def test_data_without_modes_are_refused() -> None:
    with pytest.raises(DataError, match="no classes"):
        Modes.of(examples(RING, RING))
    with pytest.raises(DataError, match=r"\[8, 2\] and \[3\]"):
        Modes(RING, torch.ones(3))
    with pytest.raises(DataError, match="3 coordinates"):
        Modes(RING, torch.ones(8))(torch.ones(4, 3), examples(RING))


def test_density_maps_are_compared_from_0_to_1() -> None:
    truth = mixture_density(normal(6, 7, 2), RING, 2.0)
    scaled = (truth - truth.min()) / (truth.max() - truth.min())
    assert density_mse(truth, truth) == 0.0
    assert density_mse(5 * truth + 3, truth) == pytest.approx(0.0, abs=1e-10)
    assert density_mse(torch.zeros(6, 7), truth) == pytest.approx(scaled.double().square().mean().item(), rel=1e-5)
    assert density_mse(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([5.0, 3.0, 1.0])) == pytest.approx(2 / 3)
    assert density_mse(torch.ones(3), torch.full((3,), 7.0)) == 0.0
    with pytest.raises(DataError, match=r"\[3\] and \[3, 1\]"):
        density_mse(torch.ones(3), torch.ones(3, 1))


def test_the_mixture_s_density_agrees_with_torch_and_integrates_to_one() -> None:
    centres, variances = torch.tensor([[0.0, 0.0], [2.0, -1.0], [-1.0, 1.0]]).double(), torch.tensor([0.5, 1.0, 0.2])
    parts = torch.distributions.Independent(
        torch.distributions.Normal(centres, variances.double().sqrt()[:, None].expand(3, 2)), 1
    )
    even = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(torch.ones(3).double()), parts)
    points = normal(4, 5, 2).double()
    torch.testing.assert_close(mixture_density(points, centres, variances), even.log_prob(points).exp())
    steps = torch.linspace(-7, 8, 151).double()
    grid = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), dim=-1)
    assert mixture_density(grid, centres, variances).sum().item() * 0.01 == pytest.approx(1.0, abs=1e-4)
    far = mixture_density(torch.full((1, 2), 1e6).double(), centres, 0.5)
    assert far.item() == 0.0
