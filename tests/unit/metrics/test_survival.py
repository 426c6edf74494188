"""Brier scores with censoring, against their definition."""

import numpy as np
import pytest
import torch

from consilience.core.errors import DataError
from consilience.metrics import brier_scores, concordance, concordant_pairs, integrated_brier, kaplan_meier


def patients(n: int = 50, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    time = (10 * torch.rand(n, generator=made, dtype=torch.float64)).ceil()  # with ties of events and censorings
    return torch.stack([time, (torch.rand(n, generator=made) < 0.6).double()], 1)


def product_limit(y: np.ndarray, t: float, *, before: bool) -> float:
    """P(not censored until t), or just before t: events leave before censorings of the same time."""
    found = 1.0
    for u in np.unique(y[:, 0]):
        if u < t or (u == t and not before):
            here = y[:, 0] == u
            at_risk = (y[:, 0] >= u).sum() - (here & (y[:, 1] == 1)).sum()
            found *= 1 - (here & (y[:, 1] == 0)).sum() / max(at_risk, 1)
    return found


def definition(survival: np.ndarray, y: np.ndarray, t: float) -> float:
    total = 0.0
    for s, (time, event) in zip(survival, y, strict=True):
        if time <= t and event:
            total += s**2 / product_limit(y, time, before=True)
        elif time > t:
            total += (1 - s) ** 2 / product_limit(y, t, before=False)
    return total / len(y)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_brier_score_is_its_definition(seed: int) -> None:
    y, times = patients(seed=seed), torch.tensor([1.0, 2.5, 5.0, 8.0])
    survival = torch.rand(len(y), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    wanted = [definition(survival[:, k].numpy(), y.numpy(), float(t)) for k, t in enumerate(times)]
    assert brier_scores(survival, y, times).tolist() == pytest.approx(wanted)
    area = np.trapezoid(wanted, times.numpy()) / 7
    assert integrated_brier(survival, y, times) == pytest.approx(area)


def test_without_censoring_it_is_the_mean_squared_error_of_being_alive() -> None:
    y = patients()
    y[:, 1] = 1
    survival = torch.full((len(y), 1), 0.3, dtype=torch.float64)
    alive = (y[:, 0] > 4).double()
    assert brier_scores(survival, y, torch.tensor([4.0])).item() == pytest.approx(float((alive - 0.3).square().mean()))


def test_the_true_curve_has_a_lower_score_than_a_wrong_one_whatever_is_censored() -> None:
    made = torch.Generator().manual_seed(0)
    death, censoring = (torch.empty(20_000).exponential_(generator=made) for _ in range(2))
    y = torch.stack([torch.minimum(death, censoring), (death <= censoring).float()], 1)
    times = torch.linspace(0.1, 2, 10)
    right = (-times).exp().expand(len(y), -1)
    assert integrated_brier(right, y, times) < integrated_brier((right + 0.1).clamp_max(1), y, times)
    full = torch.stack([death, torch.ones(len(death))], 1)
    assert integrated_brier(right, y, times) == pytest.approx(integrated_brier(right, full, times), abs=0.005)


def test_a_curve_of_kaplan_and_meier_by_hand() -> None:
    y = torch.tensor([[1.0, 1], [2.0, 0], [2.0, 1], [3.0, 1]])
    times, curve = kaplan_meier(y)
    assert times.tolist() == [1, 2, 3]
    assert curve.tolist() == pytest.approx([3 / 4, 1 / 2, 0])
    assert kaplan_meier(y, censoring=True)[1].tolist() == pytest.approx([1, 1 / 2, 1 / 2])


def test_times_after_the_end_of_follow_up_do_not_count() -> None:
    y = patients()
    survival = torch.full((len(y), 3), 0.5)
    assert integrated_brier(survival, y, torch.tensor([2.0, 4.0, 99.0])) == integrated_brier(
        survival[:, :2], y, torch.tensor([2.0, 4.0])
    )
    assert np.isnan(integrated_brier(survival[:, :1], y, torch.tensor([99.0])))


def test_curves_of_another_shape_are_refused() -> None:
    with pytest.raises(DataError, match=r"survival must be \[50, 2\]"):
        brier_scores(torch.ones(50, 3), patients(), torch.tensor([1.0, 2.0]))


def test_concordant_pairs_of_clients_add_up_to_the_concordance_within_clients() -> None:
    y, risk = patients(), torch.rand(50, generator=torch.Generator().manual_seed(3))
    right, pairs = concordant_pairs(risk, y)
    assert right / pairs == concordance(risk, y)
    halves = [concordant_pairs(risk[part], y[part]) for part in (slice(25), slice(25, None))]
    assert sum(found[1] for found in halves) < pairs
