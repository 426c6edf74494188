"""Likelihoods: predictions, draws and the data that they accept."""

import pytest
import torch
from scipy import stats
from torch import nn

from consilience.core import keys
from consilience.core.errors import DataError
from consilience.data import Dataset
from consilience.tasks.likelihoods import Bernoulli, Categorical, Normal
from consilience.tasks.supervised import Classification, MultiLabel, Regression
from support.problems import EXACT, kinds, mlp, problem


@kinds
def test_predictions_are_the_mean_of_the_likelihood(kind):
    task, theta, batch = problem(kind, 1)
    output = task.apply_one(theta[0], batch.x[0])
    mean = {"classification": output.softmax(-1), "regression": output, "multilabel": output.sigmoid()}[kind]
    torch.testing.assert_close(task.predict(theta[0], batch.x[0]), mean, **EXACT)


def test_regression_takes_targets_without_a_second_axis():
    task = Regression(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)))
    data = Dataset(torch.randn(6, 4), torch.randn(6))
    task.check(data)
    y = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(task.likelihood.losses(torch.zeros(3), y), y.square() / 2)


def test_drawn_labels_have_the_probabilities_of_the_model():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]]).expand(40_000, -1).double()
    y = Categorical().draw(logits, keys.key(0, purpose="draw"))
    assert y.dtype == torch.int64
    expected = logits[0].softmax(-1) * len(logits)
    assert stats.chisquare(y.bincount(minlength=4).numpy(), expected.numpy()).pvalue > 1e-3


def test_a_certain_class_is_always_drawn():
    for winner in range(4):
        logits = torch.full((1000, 4), -200.0)
        logits[:, winner] = 200.0
        assert bool((Categorical().draw(logits, keys.key(winner, purpose="draw")) == winner).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_drawn_regressions_have_the_noise_of_the_model(dtype):
    output = torch.linspace(-3, 3, 40_000, dtype=dtype).view(-1, 2)
    y = Normal(0.3).draw(output, keys.key(0, purpose="draw"))
    assert bool(y.isfinite().all())
    assert stats.kstest(((y - output) / 0.3).flatten().double().numpy(), "norm").pvalue > 1e-3


def test_drawn_labels_are_independent_coins():
    logits = torch.tensor([[0.0, 1.5, -2.0]]).expand(40_000, -1).double()
    y = Bernoulli().draw(logits, keys.key(0, purpose="draw"))
    p = logits[0].sigmoid()
    assert bool((((y.mean(0) - p).abs()) < 5 * (p * (1 - p) / len(y)).sqrt()).all())
    assert float((torch.corrcoef(y.T) - torch.eye(3)).abs().max()) < 5 / len(y) ** 0.5


@kinds
def test_a_client_draws_the_same_in_every_cohort_and_padding(kind):
    task, theta, batch = problem(kind, 1)
    output = task.apply_one(theta[0], batch.x[0])
    assert torch.equal(task.likelihood.draw(output, batch.key[0])[:3], task.likelihood.draw(output[:3], batch.key[0]))


def labelled(y, x=None):
    return Dataset(torch.randn(len(y), 4) if x is None else x, y, name="ward 3")


@pytest.mark.parametrize(
    ("make", "data", "words"),
    [
        (Classification, labelled(torch.tensor([0, 3])), ["ward 3", "0..3", "3 outputs", "0..2"]),
        (Classification, labelled(torch.tensor([-1, 2])), ["ward 3", "-1..2"]),
        (Classification, labelled(torch.tensor([0.0, 1.0])), ["ward 3", "torch.float32 1-d"]),
        (Classification, labelled(torch.tensor([0.0, 1.0])), ["the task is regression"]),
        (Classification, labelled(torch.eye(2, dtype=torch.int64)), ["ward 3", "torch.int64 2-d"]),
        (Classification, labelled(torch.tensor([0, 1]), torch.ones(2, 5)), ["ward 3", "(5,)"]),
        (Classification, labelled(torch.tensor([0, 1]), torch.ones(2, 4).long()), ["ward 3", "(4,)"]),
        (Classification, labelled(torch.tensor([], dtype=torch.int64)), ["ward 3 has no examples"]),
        (Regression, labelled(torch.ones(2, 2)), ["ward 3", "(2,)", "(3,)"]),
        (Regression, labelled(torch.ones(2)), ["ward 3", "()", "(3,)"]),
        (Regression, labelled(torch.ones(2, 3).long()), ["ward 3", "torch.int64"]),
        (MultiLabel, labelled(torch.ones(2, 2)), ["ward 3", "[N, 3]", "(2, 2)"]),
        (MultiLabel, labelled(torch.ones(2, 3).long()), ["ward 3", "floats"]),
        (MultiLabel, labelled(torch.full((2, 3), 0.5)), ["ward 3", "0 or 1"]),
    ],
)
def test_data_that_does_not_fit_is_refused_in_words(make, data, words):
    with pytest.raises(DataError) as error:
        make(mlp()).check(data)
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in {str(error.value)!r}"


def test_data_that_fits_is_accepted():
    Classification(mlp()).check(labelled(torch.tensor([0, 2, 1])))
    Classification(mlp()).check(labelled(torch.tensor([2])))
    Classification(mlp()).check(labelled(torch.tensor([0, 1], dtype=torch.int32)))
    Regression(mlp()).check(labelled(torch.randn(3, 3)))
    MultiLabel(mlp()).check(labelled(torch.eye(3)))
