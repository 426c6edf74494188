"""FedFisher: exact cases and limits, of the diagonal and of the Kronecker factors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.algorithms.fedfisher import FedFisher, FedFisherKFAC
from consilience.core.errors import ConfigError
from consilience.tasks.curvature import kronecker_one
from support.one_shot import ENGINE

OPTIMUM = cs.SGD(lr=0.3, epochs=400, batch_size=200)
SHORT = cs.SGD(lr=0.1, epochs=2, batch_size=16)
BOTH = pytest.mark.parametrize("kind", [FedFisher, FedFisherKFAC])


def regression(orthogonal):
    """Three clients' noisy planes, with x of every client orthogonal (or not), and the pooled least squares."""
    made = torch.Generator().manual_seed(0)
    parts = []
    for n in (40, 24, 16):
        x = torch.randn(n, 3, generator=made, dtype=torch.float64)
        if orthogonal:  # also to the column of ones of the bias
            x = torch.linalg.qr(x - x.mean(0)).Q * torch.tensor([2.0, 3.0, 4.0]).double()
        parts.append(x)
    x = torch.cat(parts)
    y = x @ torch.randn(3, 2, generator=made, dtype=torch.float64) + 0.5 * torch.randn(len(x), 2, generator=made)
    owner = torch.arange(3).repeat_interleave(torch.tensor([40, 24, 16]))
    ones = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    pooled = torch.linalg.lstsq(ones, y).solution
    data = cs.Dataset(x, y, name="planes")
    return cs.Regression(nn.Linear(3, 2), noise=0.7), cs.Federation.from_owner(data, owner), pooled


def blobs():
    made = torch.Generator().manual_seed(1)
    x = torch.randn(90, 4, generator=made)
    y = (x @ torch.randn(4, 3, generator=made)).argmax(1)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    federation = cs.Federation.from_owner(cs.Dataset(x, y), torch.arange(90) % 7 // 3)
    return cs.Classification(module), federation


def learn(method, task, federation, **options):
    return cs.fit(method, task, federation, **{"rounds": 1, "engine": ENGINE, "progress": False} | options)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "orthogonal"), [(FedFisher, True), (FedFisherKFAC, True), (FedFisherKFAC, False)])
def test_of_quadratic_losses_one_round_is_the_pooled_minimiser(kind, orthogonal):
    task, federation, pooled = regression(orthogonal)
    train = replace(OPTIMUM, lr=0.02, epochs=4000) if not orthogonal else replace(OPTIMUM, lr=0.2, epochs=2000)
    run = learn(kind(train, prior=1e-9), task, federation)
    weight, bias = run.model.weight.double(), run.model.bias.double()
    torch.testing.assert_close(torch.cat([weight.mT, bias.unsqueeze(0)]), pooled, rtol=2e-4, atol=2e-4)
    mean = learn(cs.FedAvg(train), task, federation).model.weight.double()
    assert (mean.mT - pooled[:3]).abs().max() > 0.01


@BOTH
def test_with_a_large_prior_it_is_fedavg(kind):
    task, federation = blobs()
    mean = learn(cs.FedAvg(SHORT), task, federation).posterior.mean
    far = learn(kind(SHORT, prior=1e6), task, federation).posterior.mean
    near = learn(kind(SHORT, prior=1e-3), task, federation).posterior.mean
    torch.testing.assert_close(far, mean, rtol=1e-6, atol=1e-6)
    assert (near - mean).abs().max() > 1e-3


@BOTH
def test_one_client_gets_its_own_network(kind):
    task, federation = blobs()
    alone = learn(cs.Pooled(SHORT), task, federation).posterior.mean
    found = learn(kind(SHORT), task, federation.pooled()).posterior.mean
    torch.testing.assert_close(found, alone, rtol=1e-8, atol=1e-8)


def test_the_kronecker_equations_are_solved_for_matrices_that_do_not_commute():
    made = torch.Generator().manual_seed(4)

    def positive(size):
        root = torch.randn(3, size, size, generator=made, dtype=torch.float64)
        return root @ root.mT / size

    inputs, outputs = positive(5), positive(4) / 3
    own, method = torch.randn(3, 4, 5, generator=made).double(), FedFisherKFAC(prior=0.01)
    mean = own.mean(0)
    found = method.solve(inputs, outputs, own, mean)
    dense = sum(torch.kron(g, a) for g, a in zip(outputs, inputs, strict=True)) + 0.01 * torch.eye(20).double()
    right = sum((g @ w @ a).flatten() for g, w, a in zip(outputs, own, inputs, strict=True)) + 0.01 * mean.flatten()
    torch.testing.assert_close(found.flatten(), torch.linalg.solve(dense, right), rtol=1e-4, atol=1e-4)


def test_a_client_that_knows_a_direction_has_it():
    """Client 0 sees x₀ alone and client 1 sees x₁ alone: each gives the weights that it has learned."""
    x = torch.cat([torch.tensor([[1.0, 0.0]]).repeat(20, 1), torch.tensor([[0.0, 1.0]]).repeat(20, 1)])
    y = x @ torch.tensor([[2.0], [-3.0]])
    data = cs.Dataset(x, y, name="axes")
    federation = cs.Federation.from_owner(data, torch.arange(40) // 20)
    task = cs.Regression(nn.Linear(2, 1, bias=False))
    run = learn(FedFisher(replace(OPTIMUM, lr=0.5), prior=1e-9), task, federation)
    torch.testing.assert_close(run.model.weight.double(), torch.tensor([[2.0, -3.0]]).double(), rtol=1e-4, atol=1e-4)


def test_layers_of_a_convolution_have_the_factors_of_its_patches():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(75, 4)).double()
    task = cs.Classification(module).prepare(dtype=torch.float64)
    x = torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(1)).double()
    batch = cs.data.Batch(x, torch.arange(6) % 4, torch.ones(6).double(), torch.tensor(3))
    convolution, linear = kronecker_one(task, task.initial(), batch)
    patches = nn.functional.unfold(x, 3, padding=1)
    patches = torch.cat([patches, torch.ones(6, 1, 25).double()], 1)
    torch.testing.assert_close(convolution.inputs, torch.einsum("bit,bjt->ij", patches, patches) / 6)
    probs = module(x).softmax(1)
    information = torch.diag_embed(probs) - probs.unsqueeze(2) * probs.unsqueeze(1)
    torch.testing.assert_close(linear.outputs, information.mean(0))
    assert convolution.outputs.shape == (3, 3)
    assert linear.inputs.shape == (76, 76)


def test_a_module_without_layers_that_it_can_follow_is_refused():
    norm = cs.Classification(nn.Sequential(nn.LayerNorm(4), nn.Flatten()))
    with pytest.raises(ConfigError, match="use FedFisher"):
        learn(FedFisherKFAC(SHORT), norm, blobs()[1])
