"""Scores by a classifier and Fréchet distances: known answers, and bad samples."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from consilience import metrics
from consilience.core.errors import ConfigError
from consilience.metrics import frechet
from support.samples import examples, normal, plainly

Classified = plainly(metrics.Classified)


def sure(classes: int) -> nn.Linear:
    """Logits 1,000 times the inputs: certain of one-hot rows."""
    layer = nn.Linear(classes, classes, bias=False)
    nn.init.eye_(layer.weight).data.mul_(1000)
    return layer


def test_a_classifier_s_score_is_c_for_all_classes_alike_and_1_for_a_collapse() -> None:
    eye = torch.eye(6)
    judge = Classified(sure(6))
    assert judge(eye.repeat(5, 1), examples(eye)) == pytest.approx(
        {"classifier_score": 6.0, "classes": 6.0, "class_coverage": 1.0, "classifier_distance": 0.0}, abs=0.04
    )
    collapsed = judge(eye[:1].repeat(30, 1), examples(eye))
    assert (collapsed["classifier_score"], collapsed["classes"]) == (pytest.approx(1.0), 1.0)
    half = judge(eye[:3].repeat(10, 1), examples(eye))
    assert (half["classifier_score"], half["classes"]) == (pytest.approx(3.0), 3.0)
    unsure = judge(torch.zeros(30, 6), examples(eye))
    assert unsure["classifier_score"] == pytest.approx(1.0)


def test_the_classifier_s_score_by_hand() -> None:
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]]).double()
    kl = (p * (p / p.mean(dim=0)).log()).sum(dim=1)
    module = nn.Linear(3, 3, bias=False, dtype=torch.float64)
    nn.init.eye_(module.weight)
    scores = Classified(module)(p.log(), examples(torch.eye(3)))
    assert scores["classifier_score"] == pytest.approx(kl.mean().exp().item())
    assert scores["classes"] == 3.0


def test_coverage_is_the_mean_share_of_a_fair_share_and_names_have_the_number_of_samples() -> None:
    eye = torch.eye(4)
    made = torch.cat([eye[:1].repeat(9, 1), eye[1:2].repeat(2, 1), eye[2:3]])  # fair: 3 of 12
    assert Classified(sure(4))(made, examples(eye))["class_coverage"] == pytest.approx((1 + 2 / 3 + 1 / 3) / 4)
    names = metrics.Classified(sure(4))(made, examples(eye))
    assert set(names) == {f"{n}@12" for n in ("classifier_score", "classes", "class_coverage", "classifier_distance")}
    assert all(metrics.direction(name) for name in names)


def test_a_class_counts_from_a_fifth_of_its_fair_share() -> None:
    eye = torch.eye(2)
    enough = torch.cat([eye[:1].repeat(18, 1), eye[1:].repeat(2, 1)])
    few = torch.cat([eye[:1].repeat(19, 1), eye[1:]])
    assert Classified(sure(2))(enough, examples(eye))["classes"] == 2.0
    assert Classified(sure(2))(few, examples(eye))["classes"] == 1.0
    diluted = torch.cat([enough, torch.full((20, 2), math.nan)])
    assert Classified(sure(2))(diluted, examples(eye))["classes"] == 1.0


def test_the_classifier_s_distance_is_between_inputs_of_the_last_linear_layer() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(8, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3))
    real, made = normal(70, 2, 4), 1 + 2 * normal(50, 2, 4, seed=1)
    hidden = [module[:3](x).detach().double() for x in (made, real)]
    expected = frechet(*(f(h.T) for h in hidden for f in (lambda h: h.mean(dim=1), torch.cov)))
    scores = Classified(module, batch_size=7)(made, examples(real))
    assert scores["classifier_distance"] == pytest.approx(expected, rel=1e-5)
    own = Classified(nn.Sequential(nn.Flatten(), nn.Conv1d(8, 3, 1)), features=module[:3])
    with pytest.raises(ConfigError, match=r"no nn\.Linear"):
        replace(own, features=None)(made, examples(real))
    own = Classified(nn.Sequential(module, nn.Identity()), features=module[:3])
    assert own(made, examples(real)) == pytest.approx(scores, rel=1e-5)


def test_a_judged_classifier_stays_as_it_was() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    module[1].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    first, second = (Classified(module)(normal(20, 4), examples(normal(30, 4, seed=1))) for _ in range(2))
    assert first == second
    assert [part.training for part in module] == [True, False, True]
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not module[2]._forward_pre_hooks


def test_order_does_not_matter_to_a_classifier() -> None:
    made, real = normal(40, 4), examples(normal(30, 4, seed=1))
    module = nn.Linear(4, 3)
    turned = Classified(module, batch_size=9)(made.flip(0), real)
    assert turned == pytest.approx(Classified(module)(made, real), rel=1e-5)


def test_samples_that_are_not_finite_are_of_no_class_and_infinitely_far() -> None:
    eye = torch.eye(4)
    bad = torch.full((8, 4), math.nan)
    bad[4:] = 3e38  # finite, but its logits are not
    scores = Classified(sure(4))(torch.cat([eye, eye, bad]), examples(eye))
    assert scores["classifier_score"] == pytest.approx(2.0)  # half the information: 4^½
    assert (scores["classes"], scores["classifier_distance"]) == (4.0, math.inf)
    worst = {"classifier_score": 1.0, "classes": 0.0, "class_coverage": 0.0, "classifier_distance": math.inf}
    assert Classified(sure(4))(bad[:4], examples(eye)) == worst
    assert Classified(sure(4))(bad[4:], examples(eye)) == worst
    alone = Classified(sure(4))(eye[:1], examples(eye[:1]))
    assert alone == {"classifier_score": 1.0, "classes": 1.0, "class_coverage": 0.25, "classifier_distance": 0.0}


def test_frechet_distances_of_gaussians_with_known_answers() -> None:
    eye, zero = torch.eye(3), torch.zeros(3)
    assert frechet(zero, eye, zero, eye) == pytest.approx(0.0, abs=1e-12)
    assert frechet(torch.tensor([3.0, 4.0, 0.0]), eye, zero, eye) == pytest.approx(25.0)
    # commuting covariances: Σ (√λ₁ − √λ₂)²
    first, second = torch.diag(torch.tensor([4.0, 9.0, 0.0])), torch.diag(torch.tensor([1.0, 16.0, 25.0]))
    assert frechet(zero, first, zero, second) == pytest.approx(1 + 1 + 25)
    assert frechet(zero[:1], torch.tensor([[4.0]]), zero[:1] + 2, torch.tensor([[0.25]])) == pytest.approx(4 + 1.5**2)


def test_frechet_s_distance_agrees_with_the_matrix_square_root_and_is_symmetric() -> None:
    from scipy.linalg import sqrtm

    a, b = normal(5, 5).double(), normal(5, 5, seed=1).double()
    first, second, mean = a @ a.T, b @ b.T, normal(5, seed=2).double()
    root = torch.from_numpy(sqrtm((first @ second).numpy()).real)
    expected = (mean.square().sum() + (first + second - 2 * root).trace()).item()
    assert frechet(mean, first, 0 * mean, second) == pytest.approx(expected)
    assert frechet(0 * mean, second, mean, first) == pytest.approx(expected)
    turn = torch.linalg.qr(normal(5, 5, seed=3).double()).Q
    turned = frechet(turn @ mean + 9, turn @ first @ turn.T, 0 * mean + 9, turn @ second @ turn.T)
    assert turned == pytest.approx(expected)


def test_frechet_s_distance_of_singular_covariances_is_right_and_never_negative() -> None:
    line = normal(30, 1).double()
    both = torch.cov(torch.cat([line, 2 * line, 0 * line], dim=1).T)
    zero = torch.zeros(3).double()
    assert 0 <= frechet(zero, both, zero, both) < 1e-12
    assert frechet(zero, both, zero, 9 * both) == pytest.approx(4 * both.trace().item())
    assert frechet(zero, both, zero, 0 * both) == pytest.approx(both.trace().item())
    assert frechet(zero, 0 * both, zero, both) == pytest.approx(both.trace().item())
    for seed in range(20):
        cov = torch.cov(normal(8, 30, seed=seed).double())
        assert 0 <= frechet(cov[0], cov, cov[0], cov) < 1e-12
    assert math.isnan(frechet(zero, both, zero * math.nan, both))


def test_frechet_s_distance_of_fewer_rows_than_coordinates_is_exact() -> None:
    # Σ = XᵀX and YᵀY, so the trace of the root is the nuclear norm of XYᵀ, which is small
    x, y = normal(6, 200).double(), normal(9, 200, seed=1).double()
    first, second, zero = x.T @ x, y.T @ y, torch.zeros(200)
    expected = (first.trace() + second.trace() - 2 * torch.linalg.svdvals(x @ y.T).sum()).item()
    assert frechet(zero, first, zero, second) == pytest.approx(expected, rel=1e-12)
    assert frechet(zero, second, zero, first) == pytest.approx(expected, rel=1e-12)
