"""β-PredBayes: its limits, the samples that clients send, and β by labelled data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.algorithms.predbayes import PredBayes
from consilience.core.beliefs import Interpolated
from consilience.core.errors import ConfigError, TaskError
from consilience.studies import distil, fit_beta
from support.one_shot import TRAIN, learn
from support.scenarios import blobs

SAMPLER = cs.optim.SGHMC(lr=0.01, epochs=4, batch_size=16)


def predictions(clients=3, each=2, seed=0):
    """Probabilities [M, 5, 4] of clients' networks, and the clients' means [K, 5, 4]."""
    made = torch.randn(clients * each, 5, 4, generator=torch.Generator().manual_seed(seed)).double().softmax(-1)
    return made, made.view(clients, each, 5, 4).mean(1)


def combined(made, beta, each=2):
    belief = Interpolated(torch.zeros(len(made), 1), torch.full((len(made), 1), 1 / len(made)), beta, each)
    return belief.combine(made)


def test_beta_0_is_the_mixture_and_beta_1_the_product():
    made, own = predictions()
    product = own.prod(0)
    torch.testing.assert_close(combined(made, 0.0), own.mean(0))
    torch.testing.assert_close(combined(made, 1.0), product / product.sum(-1, keepdim=True))


def test_between_the_limits_logarithms_are_interpolated():
    made, own = predictions()
    wanted = own.prod(0) ** 0.3 * own.mean(0) ** 0.7
    torch.testing.assert_close(combined(made, 0.3), wanted / wanted.sum(-1, keepdim=True))


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_one_client_predicts_alike_for_every_beta(beta):
    made, own = predictions(clients=1, each=6)
    torch.testing.assert_close(combined(made, beta, each=6), own[0])


def test_clients_that_agree_make_the_product_surer_than_each_of_them():
    made, own = predictions(clients=1, each=1)
    alike = made.repeat(4, 1, 1)
    torch.testing.assert_close(combined(alike, 0.0, each=1), own[0])
    assert bool((combined(alike, 1.0, each=1).amax(-1) > own[0].amax(-1)).all())


def test_the_samples_are_the_networks_after_the_last_epochs():
    task, train, _ = blobs()
    run = learn(PredBayes(SAMPLER, samples=2), task, train)
    assert run.server.theta.shape == (6, 2, task.size)
    assert run.posterior.theta.shape == (12, task.size)
    longer = learn(PredBayes(SAMPLER, samples=4), task, train)
    assert torch.equal(longer.server.theta[:, 2:], run.server.theta)
    assert (run.server.theta[:, 0] - run.server.theta[:, 1]).abs().max() > 0
    few = learn(PredBayes(replace(SAMPLER, epochs=1), samples=6), task, train)
    assert few.server.theta.shape[1] == 1


def test_without_noise_and_with_one_sample_beta_0_is_the_ensemble():
    task, train, test = blobs()
    run = learn(PredBayes(TRAIN, beta=0.0, samples=1), task, train)
    ensemble = learn(cs.algorithms.Ensemble(TRAIN), task, train)
    assert torch.equal(run.server.theta[:, 0], ensemble.server.theta)
    torch.testing.assert_close(run.predict(test.data.x), ensemble.predict(test.data.x))
    found = run.evaluate(test.data)
    assert found.belief == "Mixture"
    assert found.point["nll"] == pytest.approx(ensemble.evaluate(test.data).point["nll"])


def test_beta_is_the_best_of_a_grid_by_labelled_data():
    task, train, test = blobs()
    run = learn(PredBayes(SAMPLER), task, train)
    fitted = fit_beta(run, test.data)
    scores = {
        beta: replace(run, algorithm=replace(run.algorithm, beta=beta)).evaluate(test.data).point["nll"]
        for beta in (0.0, 0.25, 0.5, 0.75, 1.0)
    }
    assert fitted.evaluate(test.data).point["nll"] <= min(scores.values()) + 1e-9
    assert fit_beta(run, test.data, grid=[0.25]).algorithm.beta == 0.25
    with pytest.raises(ConfigError, match="β belongs to PredBayes"):
        fit_beta(learn(cs.algorithms.Ensemble(TRAIN), task, train), test.data)


def test_a_student_imitates_the_interpolation():
    task, train, test = blobs()
    run = learn(PredBayes(SAMPLER, beta=0.5), task, train)
    student = distil(run, nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3)),
                     cs.optim.AMSGrad(lr=0.02, epochs=60), progress=False)  # fmt: skip
    assert (student.predict(test.data.x) - run.predict(test.data.x)).abs().mean() < 0.05


def test_it_is_for_probabilities_of_classes():
    with pytest.raises(TaskError, match="use Ensemble"):
        PredBayes().adapt(cs.Regression(nn.Linear(2, 1)), 0)
