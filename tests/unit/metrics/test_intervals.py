"""Intervals contain the true value as often as they say."""

import math

import pytest
import torch
from scipy.stats import binom, norm
from torch import Tensor

from consilience.core.errors import ConfigError
from consilience.metrics import auroc_interval, check_level, mean_of_shares, percentiles, wilson
from consilience.metrics.intervals import Bounds

TIMES = 400
GENERATOR = torch.Generator().manual_seed(0)


def covered(intervals: list[Bounds | None], truth: float) -> int:
    """The number of intervals that contain the truth."""
    return sum(found is not None and found[0] <= truth <= found[1] for found in intervals)


def assert_covers(count: int, level: float = 0.95) -> None:
    """As many of `TIMES` intervals as a binomial draw may be, up to one in a thousand on either side."""
    low, high = binom.ppf([0.001, 0.999], TIMES, level)
    assert low <= count <= high


def scores(n: int, m: int, shift: float) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(n + m, generator=GENERATOR, dtype=torch.float64)
    return drawn[:n], drawn[n:] + shift


@pytest.mark.parametrize(("n", "m", "shift"), [(60, 60, 1.0), (200, 30, 0.5), (50, 50, 0.0), (300, 40, 2.0)])
def test_delong_covers_the_true_area(n: int, m: int, shift: float) -> None:
    truth = float(norm.cdf(shift / math.sqrt(2)))
    assert_covers(covered([auroc_interval(*scores(n, m, shift), 0.95) for _ in range(TIMES)], truth))


def test_delong_of_another_level() -> None:
    truth = float(norm.cdf(1 / math.sqrt(2)))
    assert_covers(covered([auroc_interval(*scores(80, 80, 1.0), 0.8) for _ in range(TIMES)], truth), 0.8)


def test_the_interval_of_an_area_stays_within_0_and_1() -> None:
    for shift in (3.0, 5.0, -3.0, -5.0):
        for _ in range(50):
            found = auroc_interval(*scores(20, 10, shift), 0.95)
            assert found is not None
            assert 0 <= found[0] < found[1] <= 1


def test_scores_that_separate_the_classes_leave_doubt() -> None:
    low, high = auroc_interval(torch.zeros(20), torch.ones(10), 0.95) or [0.0, 0.0]
    assert (low, high) == (pytest.approx(0.025**0.1), 1.0)
    assert auroc_interval(torch.ones(20), torch.zeros(10), 0.95) == [0.0, pytest.approx(1 - 0.025**0.1)]


def test_a_class_of_one_example_has_no_interval() -> None:
    assert auroc_interval(torch.zeros(20), torch.ones(1), 0.95) is None


@pytest.mark.parametrize("truth", [0.5, 0.8, 0.93])
def test_wilson_covers_a_share(truth: float) -> None:
    right = (torch.rand(TIMES, 100, generator=GENERATOR) < truth).double().mean(1)
    assert_covers(covered([wilson(float(share), 100, 0.95) for share in right], truth))


def test_a_share_of_one_leaves_doubt() -> None:
    assert wilson(1.0, 30, 0.95) == [pytest.approx(0.8865, abs=1e-4), 1.0]


def test_the_mean_of_two_shares_is_covered() -> None:
    sick, well = (torch.rand(TIMES, n, generator=GENERATOR).lt(p).double().mean(1) for n, p in ((30, 0.7), (120, 0.9)))
    found = [mean_of_shares([float(a), float(b)], [30, 120], 0.95) for a, b in zip(sick, well, strict=True)]
    assert_covers(covered(found, 0.8))


def test_replicates_in_which_the_score_is_not_defined_do_not_count() -> None:
    drawn = torch.arange(1001.0, dtype=torch.float64)
    drawn[::2] = math.nan
    assert percentiles(drawn, 0.9) == pytest.approx([50.9, 949.1], abs=0.5)


def test_replicates_that_do_not_vary_give_no_interval() -> None:
    assert percentiles(torch.ones(10), 0.95) is None
    assert percentiles(torch.full((10,), math.nan), 0.95) is None


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0])
def test_a_level_is_a_probability(level: float) -> None:
    with pytest.raises(ConfigError, match="a probability between 0 and 1"):
        check_level(level)
