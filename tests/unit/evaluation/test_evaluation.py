"""Uncertainty: entropies of known predictions, what a posterior adds to them, and that strange data is noticed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.functional import hessian

import consilience as cs
from consilience.core.beliefs import draws
from consilience.core.errors import DataError, TaskError
from consilience.evaluation.detection import Detection, detect
from consilience.evaluation.predictions import predict
from consilience.evaluation.uncertainty import Entropies, histogram, uncertainty
from consilience.evaluation.weights import marginals
from consilience.metrics import entropy
from support.scenarios import blobs, linear

CLASSES = 3


def cloud(n: int = 60, centre: float = 0.0, seed: int = 0) -> cs.Dataset:
    """Points of the plane whose labels mean nothing."""
    x = centre + torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    return cs.Dataset(x, torch.full((n,), -1), name="cloud")


def plane() -> cs.Classification:
    """Logits that are linear in the input, in double precision."""
    return cs.Classification(nn.Linear(2, CLASSES)).prepare(dtype=torch.float64)


def belief(task: cs.Task, variance: float, seed: int = 0) -> cs.Gaussian:
    mean = torch.randn(task.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return cs.Gaussian.of(mean, torch.tensor([1 / variance], dtype=torch.float64))


def learned() -> tuple[cs.Classification, cs.Gaussian, cs.Dataset]:
    """Logistic regression on three clouds, with its Laplace posterior under the prior N(0, 1); and other points of
    the clouds. A third feature is 0 in all of them."""
    _, train, test = blobs()
    task = cs.Classification(nn.Linear(3, CLASSES)).prepare(dtype=torch.float64)
    x = lifted(train.data).x.double()
    theta = torch.zeros(task.size, dtype=torch.float64)

    def energy(theta: Tensor) -> Tensor:
        return task.likelihood.losses(task.apply_one(theta, x), train.data.y).sum() + 0.5 * theta.square().sum()

    for _ in range(20):
        theta = theta - torch.linalg.solve(hessian(energy, theta), torch.func.grad(energy)(theta))
    return task, cs.Gaussian.of(theta, hessian(energy, theta)), lifted(test.data)


def lifted(data: cs.Dataset, height: float = 0.0) -> cs.Dataset:
    """The same points with a third coordinate."""
    return replace(data, x=torch.cat([data.x[:, :2], torch.full((len(data), 1), height)], dim=1))


# Uncertainty


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


@settings(max_examples=30, deadline=None)
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


@pytest.mark.parametrize("batch_size", [1, 7, 60, 61])
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
    x = torch.linspace(-1, 5, 40, dtype=torch.float64)[:, None]
    posterior = cs.Gaussian.of(torch.tensor([1.0, 2, 3, 4], dtype=torch.float64), torch.full((1,), 4.0).double())
    data = cs.Dataset(x, task.predict(posterior.mean, x) + torch.sin(9 * x))
    return task, posterior, data, (0.01 + (1 + x.square()) / 4).expand(-1, 2)


def test_a_marginal_regression_knows_of_the_doubt_about_the_weights() -> None:
    task, posterior, data, variance = line()
    found = cs.evaluate(task, posterior, data, samples=20_000)
    exact = torch.distributions.Normal(task.predict(posterior.mean, data.x), variance.sqrt())
    assert found.marginal is not None
    assert found.marginal["nll"] == pytest.approx(-exact.log_prob(data.y).mean().item(), rel=0.01)
    assert found.point["nll"] > 10 * found.marginal["nll"]


def test_a_few_draws_of_a_regression_vary_as_the_posterior_does_on_average() -> None:
    task = cs.Regression(nn.Linear(1, 5000), noise=0.1)
    posterior = cs.Gaussian.of(torch.zeros(10_000), torch.tensor([4.0]))
    found = uncertainty(task, posterior, cs.Dataset(torch.zeros(1, 1), torch.zeros(1, 5000)), samples=3).sd
    assert found is not None
    assert float(found.square().mean()) == pytest.approx(0.26, rel=0.05)


def test_the_doubt_about_a_regression_is_that_of_its_gaussian() -> None:
    task, posterior, data, variance = line()
    found = uncertainty(task, posterior, data, samples=20_000)
    wanted = torch.distributions.Normal(0.0, variance.sqrt()).entropy().sum(1)
    torch.testing.assert_close(found.sd, variance.sqrt(), rtol=0.03, atol=0)
    torch.testing.assert_close(found.entropy, wanted, rtol=0, atol=0.06)
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


# Beliefs


def test_a_posteriors_marginal_is_the_plain_mean_over_its_draws() -> None:
    task, data = plane(), cloud()
    posterior, index = belief(task, 2.0), torch.arange(60)
    x = data.x.double()
    each = torch.stack([task.predict(theta, x) for theta in posterior.sample(7)])
    torch.testing.assert_close(predict(task, posterior, data, index, samples=7), each.mean(0), rtol=1e-13, atol=1e-13)
    assert torch.equal(predict(task, posterior, data, index), task.predict(posterior.mean, x))
    assert torch.equal(predict(task, cs.Point(posterior.mean), data, index, samples=7), task.predict(posterior.mean, x))


def test_what_a_belief_predicts_with() -> None:
    task = plane()
    posterior = belief(task, 1.0)
    drawn = draws(posterior, 4)
    assert torch.equal(drawn.theta, posterior.sample(4))
    assert drawn.weights.flatten().tolist() == [0.25] * 4
    assert torch.equal(draws(posterior, 0).theta, posterior.mean.unsqueeze(0))
    mixture = cs.core.Mixture.of(torch.randn(3, task.size))
    assert draws(mixture, 10) is mixture


@pytest.mark.parametrize("shape", [(5, 3), (5, 1), (5,), (5, 2, 2)], ids=str)
def test_networks_that_count_alike_are_averaged_whatever_they_predict(shape: tuple[int, ...]) -> None:
    mixture = cs.core.Mixture.of(torch.zeros(4, 9))
    predictions = torch.rand(4, *shape, dtype=torch.float64)
    torch.testing.assert_close(mixture.combine(predictions), predictions.mean(0))


def test_weights_by_class_are_of_classes_and_predictions_still_sum_to_one() -> None:
    weights = torch.tensor([[1.0, 0.25, 0.5], [0.0, 0.75, 0.5]])
    predictions = torch.tensor([[[0.5, 0.25, 0.25]], [[0.1, 0.1, 0.8]]]).double()
    raw = torch.tensor([0.5, 0.25 * 0.25 + 0.75 * 0.1, 0.5 * 0.25 + 0.5 * 0.8]).double()
    combined = cs.core.Mixture(torch.zeros(2, 9), weights).combine(predictions)
    torch.testing.assert_close(combined, (raw / raw.sum()).unsqueeze(0))


def test_weights_in_single_precision_sum_to_one_in_double() -> None:
    # As float32, 41 times 1/41 is less than 1 by 3e-8, which would pass for mutual information.
    mixture = cs.core.Mixture.of(torch.zeros(41, 9))
    predictions = torch.full((41, 2, 4), 0.25, dtype=torch.float64)
    torch.testing.assert_close(mixture.combine(predictions).sum(-1), torch.ones(2).double(), rtol=1e-14, atol=0)


def test_clients_of_an_ensemble_are_scored_by_all_of_it() -> None:
    task, train, test = blobs()
    task = task.prepare(dtype=torch.float64)
    mixture = cs.core.Mixture.of(torch.randn(3, task.size, generator=torch.Generator().manual_seed(0)).double())
    found = cs.evaluate(task, mixture, test)
    assert found.marginal is None
    assert len(found.clients) == len(train)
    part = cs.evaluate(task, mixture, test.data[test.indices(2)])
    assert found.clients[2]["metrics"] == pytest.approx(part.point)


# Entropies of an evaluation


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


@given(st.lists(st.floats(-3, 3), max_size=30))
def test_a_histogram_counts_every_value_once(values: list[float]) -> None:
    counts = histogram(torch.tensor(values, dtype=torch.float64), torch.linspace(-1, 1, 5))
    inner = [sum(-1 + 0.5 * i <= v < -0.5 + 0.5 * i for v in values) for i in (1, 2)]
    assert (len(counts), sum(counts), counts[1:3]) == (4, len(values), inner)


def test_an_evaluation_tells_outside_from_inside_as_detection_does() -> None:
    task, posterior, inside = learned()
    outside = lifted(cloud(30), height=30.0)
    found, expected = cs.evaluate(task, posterior, inside, outside=outside), detect(task, posterior, inside, outside)
    content = json.loads(json.dumps(found.to_json()))
    assert (content["outside"], content["belief"]) == ("cloud", "Gaussian")
    for kind, area, mean in (
        ("point", expected.point, expected.outside_entropy),
        ("marginal", expected.marginal, expected.marginal_outside_entropy),
    ):
        entropies = content[kind]["entropy"]
        assert entropies["auroc"]["outside"] == pytest.approx(area)
        assert entropies["outside"]["mean"] == pytest.approx(mean)
        right, wrong = (sum(entropies[group]["count"]) for group in ("right", "wrong"))
        assert right / len(inside) == pytest.approx(content[kind]["metrics"]["accuracy"])
        assert right + wrong == len(inside)


def test_outside_examples_are_dealt_to_the_clients() -> None:
    task, _, test = blobs()
    task = task.prepare(dtype=torch.float64)
    certain, unsure = (cs.Point(scale * task.initial()) for scale in (50.0, 0.0))
    found = cs.evaluate(task, lambda c: unsure if c % 2 else certain, test, outside=cloud(7))
    assert found.entropy is not None
    assert found.entropy.outside is not None
    # Clients 1, 3 and 5 of 6 are those who know nothing: examples 1, 3 and 5 of 7.
    assert int((found.entropy.outside > math.log(3) - 1e-9).sum()) == 3


def test_regression_and_unfit_outside_data_are_refused_and_an_ensemble_has_one_kind_of_entropy() -> None:
    regression, federation = linear()
    assert cs.evaluate(regression, cs.Point(regression.initial()), federation).entropy is None
    with pytest.raises(TaskError, match="the task is regression"):
        cs.evaluate(regression, cs.Point(regression.initial()), federation, outside=federation.data)
    task, data = plane(), replace(cloud(), y=torch.zeros(60, dtype=torch.int64))
    with pytest.raises(DataError, match="digits"):
        cs.evaluate(task, belief(task, 1.0), data, outside=cs.Dataset(torch.zeros(3, 9), torch.zeros(3), name="digits"))
    mixture = cs.evaluate(task, cs.core.Mixture.of(belief(task, 1.0).sample(3)), data).to_json()
    assert (mixture["belief"], mixture["marginal"]) == ("Mixture", None)
    assert sum(mixture["point"]["entropy"]["right"]["count"]) > 0


# Marginals of the weights


def test_marginals_are_those_of_every_kind_of_precision() -> None:
    task = plane()
    mean = torch.linspace(-2, 2, task.size, dtype=torch.float64)
    kinds = {
        "diagonal": torch.linspace(1, 9, task.size, dtype=torch.float64),
        "scalar": torch.tensor([4.0], dtype=torch.float64),
        "full": torch.diag(torch.linspace(1, 9, task.size, dtype=torch.float64)) + 0.1,
    }
    for kind, precision in kinds.items():
        q = cs.Gaussian.of(mean, precision)
        found = marginals(task, q)
        assert found is not None, kind
        assert json.loads(json.dumps(found)) == found
        assert found["weights"] == task.size == 9
        assert found["known"] == pytest.approx(float((mean.abs() > 2 * q.variance.sqrt()).double().mean()))
        assert [t["name"] for t in found["tensors"]] == ["weight", "bias"]
        for name in ("sd", "ratio"):
            edges, whole = found["edges"][name], found["all"][name]
            assert sorted(edges) == edges
            assert (len(edges), sum(whole)) == (31, 9)
            parts = [tensor[name] for tensor in found["tensors"]]
            assert [sum(column) for column in zip(*parts, strict=True)] == whole
        assert found["edges"]["sd"][0] < math.log10(float(q.variance.sqrt().min()))
        shown = {example["name"]: (example["mean"], example["sd"]) for example in found["examples"]}
        assert len(shown) == 8
        assert shown["weight[0, 0]"] == pytest.approx((mean[0].item(), q.variance[0].sqrt().item()))
        assert shown["bias[2]"] == pytest.approx((mean[8].item(), q.variance[8].sqrt().item()))


def test_at_most_twelve_parameters_are_listed_and_they_are_the_largest() -> None:
    task = cs.Classification(nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)]))
    found = marginals(task, cs.Gaussian.of(task.initial(), torch.ones(1)))
    assert found is not None
    names = [tensor["name"] for tensor in found["tensors"]]
    assert (len(names), found["of_tensors"]) == (12, 16)
    assert [name for name in names if name.endswith("weight")] == [f"{i}.weight" for i in range(8)]


def test_appended_networks_count_and_have_no_names_of_their_own() -> None:
    task = cs.Classification(nn.Linear(2, 2)).extend(other=nn.Linear(1, 1, bias=False))
    found = marginals(task, cs.Gaussian.of(task.initial(), torch.ones(task.size)))
    assert found is not None
    assert sum(found["all"]["sd"]) == 7
    assert sum(sum(tensor["sd"]) for tensor in found["tensors"]) == 6
    assert found["examples"][-1]["name"] == "weight 6"


def test_a_posterior_that_has_diverged_has_no_marginals() -> None:
    task = plane()
    assert marginals(task, cs.Gaussian.of(torch.full((9,), math.nan), torch.ones(1))) is None
    half = torch.where(torch.arange(9) < 5, 1.0, math.nan)
    found = marginals(task, cs.Gaussian.of(half, torch.ones(9)))
    assert found is not None
    assert sum(found["all"]["ratio"]) == 5
