"""Predictions of beliefs and their scores."""

import json
import math
from dataclasses import replace

import pytest
import torch

import consilience as cs
from consilience.core.beliefs import draws
from consilience.core.errors import DataError, TaskError
from consilience.evaluation.detection import detect
from consilience.evaluation.predictions import predict
from support.planes import belief, cloud, learned, lifted, plane
from support.scenarios import blobs, linear


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
