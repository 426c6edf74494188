"""Entropies of known predictions, their parts, and the detection of out-of-distribution examples."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import consilience as cs
from consilience.core.errors import DataError, TaskError
from consilience.evaluation.detection import Detection, detect
from consilience.evaluation.predictions import predict
from consilience.evaluation.uncertainty import Entropies, histogram, uncertainty
from consilience.metrics import entropy
from support.planes import CLASSES, belief, cloud, learned, lifted, plane
from support.scenarios import blobs


def test_a_point_has_the_entropy_of_its_softmax_and_no_doubt_about_its_weights() -> None:
    task = plane()
    bias = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).log()  # probabilities 1/8, 2/8, 5/8 whatever the input
    found = uncertainty(task, cs.Point(torch.cat([torch.zeros(6, dtype=torch.float64), bias])), cloud(4))
    expected = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    assert found.entropy.tolist() == pytest.approx([expected] * 4, rel=1e-12)
    assert torch.equal(found.entropy, found.expected_entropy)
    assert torch.equal(found.mutual_information, torch.zeros(4, dtype=torch.float64))


def test_entropies_are_those_of_the_averaged_prediction_and_the_average_over_draws() -> None:
    task, data = plane(), cloud()
    posterior = belief(task, 2.0)
    found = uncertainty(task, posterior, data, samples=7)
    averaged = predict(task, posterior, data, torch.arange(len(data)), samples=7)
    each = [entropy(task.predict(theta, data.x.double())) for theta in posterior.sample(7)]
    torch.testing.assert_close(found.entropy, entropy(averaged))
    torch.testing.assert_close(found.expected_entropy, torch.stack(each).mean(0))
    torch.testing.assert_close(found.mutual_information, found.entropy - found.expected_entropy)


def test_certain_models_that_disagree_have_all_their_entropy_as_mutual_information() -> None:
    task, data = plane(), cloud()
    posterior = belief(task, 1e12)
    one, other = (task.predict(theta, data.x.double()).argmax(1) for theta in posterior.sample(2))
    disagree = one != other
    assert 0 < int(disagree.sum()) < len(data)
    found = uncertainty(task, posterior, data, samples=2)
    torch.testing.assert_close(found.mutual_information, disagree.double() * math.log(2))
    torch.testing.assert_close(found.expected_entropy, torch.zeros(len(data), dtype=torch.float64))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), log_variance=st.floats(-12, 12), samples=st.integers(1, 12))
def test_mutual_information_is_between_zero_and_log_c(seed: int, log_variance: float, samples: int) -> None:
    task = plane()
    found = uncertainty(task, belief(task, math.exp(log_variance), seed), cloud(10, seed=seed), samples=samples)
    assert bool((found.mutual_information >= 0).all())
    assert bool((found.mutual_information <= math.log(CLASSES) + 1e-12).all())
    assert bool((found.entropy <= math.log(CLASSES) + 1e-12).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mutual_information_vanishes_with_the_variance_and_grows_with_it(dtype: torch.dtype) -> None:
    task, data = plane().prepare(dtype=dtype), cloud()
    narrow, middle, wide = (uncertainty(task, belief(task, v), data).mutual_information for v in (1e-16, 0.1, 10.0))
    assert float(narrow.max()) < 1e-12
    assert bool((middle > 1e-6).all())
    assert bool((wide > 1e-6).all())
    assert float(wide.mean()) > float(middle.mean())


@pytest.mark.parametrize("batch_size", [7, 61])
def test_the_batch_size_changes_nothing(batch_size: int) -> None:
    task, data = plane(), cloud()
    whole, parts = (uncertainty(task, belief(task, 1.0), data, batch_size=size) for size in (1000, batch_size))
    for name in ("entropy", "expected_entropy", "mutual_information"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-12, atol=1e-12)


def test_stored_images_are_scaled_as_in_training() -> None:
    task = plane()
    scale = torch.tensor(1 / 255)
    data = cs.Dataset(torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8), torch.zeros(2), scale=scale)
    probs = task.predict(belief(task, 1.0).mean, data.x.double() / 255)
    torch.testing.assert_close(uncertainty(task, cs.Point(belief(task, 1.0).mean), data).entropy, entropy(probs))


# Detection


def test_identical_sets_cannot_be_told_apart() -> None:
    task, data = plane(), cloud()
    found = detect(task, belief(task, 1.0), data, data)
    assert (found.point, found.marginal, found.mutual_information) == (0.5, 0.5, 0.5)
    assert found.inside_entropy == found.outside_entropy
    assert found.marginal_inside_entropy == found.marginal_outside_entropy


def test_points_between_the_classes_are_found_by_all_entropies() -> None:
    task, posterior, inside = learned()
    found = detect(task, posterior, inside, lifted(replace(cloud(), x=0.05 * cloud().x)))
    assert found.point > 0.98
    assert found.marginal is not None
    assert found.marginal > 0.98


def test_a_feature_never_seen_in_training_is_noticed_by_the_posterior_and_not_by_the_mean_weights() -> None:
    task, posterior, inside = learned()
    found = detect(task, posterior, inside, lifted(inside, height=30.0), samples=20)
    assert found.point == pytest.approx(0.5, abs=0.02)
    assert found.marginal is not None
    assert found.marginal > 0.98
    assert found.mutual_information is not None
    assert found.mutual_information > 0.98


def test_detection_is_by_entropies_whose_means_it_reports() -> None:
    task, posterior, inside = learned()
    outside = lifted(cloud(30))
    found = detect(task, posterior, inside, outside, samples=4)
    point, marginal = (uncertainty(task, posterior, outside, samples=samples).entropy for samples in (0, 4))
    assert found.outside_entropy == pytest.approx(float(point.mean()))
    assert found.marginal_outside_entropy == pytest.approx(float(marginal.mean()))
    assert found.inside_entropy < found.outside_entropy


def test_a_point_has_no_marginal_and_gives_what_the_mean_of_a_posterior_does() -> None:
    task, posterior, inside = learned()
    point, bayesian = (detect(task, q, inside, lifted(cloud())) for q in (cs.Point(posterior.mean), posterior))
    assert (point.marginal, point.mutual_information, point.marginal_inside_entropy) == (None, None, None)
    assert (point.point, point.outside_entropy) == (bayesian.point, bayesian.outside_entropy)
    assert Detection(**json.loads(json.dumps(asdict(bayesian)))) == bayesian


def test_labels_are_not_looked_at() -> None:
    task, data = plane(), cloud()
    other = replace(data, y=torch.rand(len(data), 5))
    assert detect(task, belief(task, 1.0), data, other).point == 0.5


def test_data_the_module_cannot_take_is_refused_by_name() -> None:
    task, data = plane(), cloud()
    images = cs.Dataset(torch.zeros(3, 28, 28), torch.zeros(3), name="digits")
    with pytest.raises(DataError, match=r"cannot take examples of digits, of shape \(28, 28\)"):
        detect(task, belief(task, 1.0), data, images)
    with pytest.raises(DataError, match="cloud has no examples"):
        uncertainty(task, belief(task, 1.0), cloud(0))


def test_many_labels_have_no_predictive_entropy() -> None:
    task = cs.MultiLabel(nn.Linear(2, 3))
    with pytest.raises(TaskError, match="the task is multi-label"):
        uncertainty(task, cs.Point(task.initial()), cloud())


def line() -> tuple[cs.Regression, cs.Gaussian, cs.Dataset, Tensor]:
    """y = a + b x with N(·, 1/4) for a and b, outputs twice; and what y's variance is in theory, with noise 0.1."""
    task = cs.Regression(nn.Linear(1, 2), noise=0.1).prepare(dtype=torch.float64)
    x = torch.linspace(-1, 5, 12, dtype=torch.float64)[:, None]
    posterior = cs.Gaussian.of(torch.tensor([1.0, 2, 3, 4], dtype=torch.float64), torch.full((1,), 4.0).double())
    data = cs.Dataset(x, task.predict(posterior.mean, x) + torch.sin(9 * x))
    return task, posterior, data, (0.01 + (1 + x.square()) / 4).expand(-1, 2)


def test_a_marginal_regression_knows_of_the_doubt_about_the_weights() -> None:
    task, posterior, data, variance = line()
    found = cs.evaluate(task, posterior, data, samples=3000)
    exact = torch.distributions.Normal(task.predict(posterior.mean, data.x), variance.sqrt())
    assert found.marginal is not None
    assert found.marginal["nll"] == pytest.approx(-exact.log_prob(data.y).mean().item(), rel=0.03)
    assert found.point["nll"] > 10 * found.marginal["nll"]


def test_a_few_draws_of_a_regression_vary_as_the_posterior_does_on_average() -> None:
    task = cs.Regression(nn.Linear(1, 5000), noise=0.1)
    posterior = cs.Gaussian.of(torch.zeros(10_000), torch.tensor([4.0]))
    found = uncertainty(task, posterior, cs.Dataset(torch.zeros(1, 1), torch.zeros(1, 5000)), samples=3).sd
    assert found is not None
    assert float(found.square().mean()) == pytest.approx(0.26, rel=0.05)


def test_the_doubt_about_a_regression_is_that_of_its_gaussian() -> None:
    task, posterior, data, variance = line()
    found = uncertainty(task, posterior, data, samples=3000)
    wanted = torch.distributions.Normal(0.0, variance.sqrt()).entropy().sum(1)
    torch.testing.assert_close(found.sd, variance.sqrt(), rtol=0.06, atol=0)
    torch.testing.assert_close(found.entropy, wanted, rtol=0, atol=0.12)
    torch.testing.assert_close(found.entropy, found.expected_entropy + found.mutual_information)
    alone = uncertainty(task, cs.Point(posterior.mean), data)
    assert alone.mutual_information.max() == 0
    torch.testing.assert_close(alone.sd, torch.full_like(data.y, 0.1))
    assert detect(task, posterior, data, replace(data, x=data.x + 20)).mutual_information == 1


def test_a_run_is_asked_for_its_server_s_belief() -> None:
    task, train, test = blobs()
    engine = cs.Simulator(device="cpu", chunk=4, workers=1)
    run = cs.fit(cs.FedAvg(cs.SGD(lr=0.1)), task, train, rounds=2, engine=engine, progress=False)
    outside = cloud()
    assert torch.equal(run.uncertainty(outside).entropy, uncertainty(run.task, run.posterior, outside).entropy)
    assert run.detect(test.data, outside) == detect(run.task, run.posterior, test.data, outside)


def test_entropies_of_right_and_wrong_predictions_fall_into_their_bins() -> None:
    entropies = torch.tensor([0.0, 0.01, math.log(3), math.log(3) + 1e-6, 0.6, math.nan])
    found = Entropies(entropies, torch.tensor([True, True, False, False, True, True]), 3).to_json()
    assert found["edges"] == pytest.approx([math.log(3) * i / 20 for i in range(21)])
    assert found["right"]["count"] == [2, *[0] * 9, 1, *[0] * 9]
    assert found["wrong"]["count"] == [*[0] * 19, 2]
    assert found["right"]["mean"] == pytest.approx(0.61 / 3)
    assert found["auroc"] == {"wrong": 1.0, "outside": None}
    assert "outside" not in found
    assert json.loads(json.dumps(found)) == found


def test_where_nothing_is_wrong_there_is_nothing_to_tell_apart() -> None:
    found = Entropies(torch.rand(5), torch.ones(5, dtype=torch.bool), 10, torch.rand(4)).to_json()
    assert found["wrong"] == {"count": [0] * 20, "mean": None}
    assert found["auroc"]["wrong"] is None
    assert sum(found["outside"]["count"]) == 4


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-3, 3), max_size=30))
def test_a_histogram_counts_every_value_once(values: list[float]) -> None:
    counts = histogram(torch.tensor(values, dtype=torch.float64), torch.linspace(-1, 1, 5))
    inner = [sum(-1 + 0.5 * i <= v < -0.5 + 0.5 * i for v in values) for i in (1, 2)]
    assert (len(counts), sum(counts), counts[1:3]) == (4, len(values), inner)


# The normalisation of out-of-distribution examples


def images(scale: float | None, name: str, shift: float | None = -1.0, size: int = 2) -> cs.Dataset:
    """Bytes with a normalisation of their own."""
    x = torch.arange(6 * size, dtype=torch.uint8).view(6, 1, 1, size) * 10
    parts = {"scale": scale, "shift": shift} if scale is not None else {}
    own = {key: torch.full((1, 1, 1), value) for key, value in parts.items()}
    return cs.Dataset(x, torch.tensor([0, 1, 2] * 2), name=name, **own)


def test_examples_outside_are_seen_as_the_deployed_model_would_see_them() -> None:
    """Out-of-distribution images get the training data's scale and shift, wherever they enter."""
    train, outside = images(0.01, "ours"), images(0.3, "theirs", 4.0)
    seen = replace(outside, scale=train.scale, shift=train.shift)
    task = cs.Classification(nn.Sequential(nn.Flatten(), nn.Linear(2, 3)))
    run = cs.fit(cs.FedAvg(), task, cs.partition.iid(train, 2), test=train, outside=outside, rounds=1, progress=False)
    wanted = uncertainty(run.task, run.posterior, seen).entropy
    assert float(uncertainty(run.task, run.posterior, outside).entropy.mean()) != pytest.approx(float(wanted.mean()))
    assert run.detect(train, outside) == detect(run.task, run.posterior, train, seen)
    assert detect(run.task, run.posterior, train, outside) == detect(run.task, run.posterior, train, seen)
    inputs = train.inputs(torch.arange(6))
    assert run.detect((inputs, train.y), outside) == detect(run.task, run.posterior, train, seen)
    for found in (run.evaluation, run.evaluate(train, outside=outside)):
        assert found is not None
        assert found.entropy is not None
        torch.testing.assert_close(found.entropy.outside, wanted, check_dtype=False)


def test_examples_that_cannot_be_normalised_so_are_refused_and_model_inputs_stay() -> None:
    train, numbers = images(0.01, "ours"), cs.Dataset(torch.randn(4, 1, 1, 2), torch.zeros(4), name="inputs")
    assert numbers.normalised_as(train) is numbers
    assert torch.equal(images(None, "bare").normalised_as(train).inputs(torch.arange(6)), train.inputs(torch.arange(6)))
    with pytest.raises(DataError, match="large cannot have the scale and shift of ours: its examples are 1 × 1 × 3"):
        images(0.3, "large", size=3).normalised_as(train)
    with pytest.raises(DataError, match="theirs has a scale and shift of its own, and those of inputs are not known"):
        images(0.3, "theirs").normalised_as(numbers)
