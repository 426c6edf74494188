"""Expected Fisher information: by layers and by examples, against plain gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev

import consilience as cs
from consilience.tasks import curvature

NETS = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(50, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.Conv2d(3, 4, 2, padding=1, bias=False), nn.Flatten(),
        nn.Linear(36, 3),
    ),
    "norm": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 3)),
}  # fmt: skip


def case(net, kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = NETS[net]().double()
    task = kind(module).prepare(dtype=torch.float64)
    made = torch.Generator().manual_seed(1)
    x = torch.randn(5, 2, 5, 5, generator=made, dtype=torch.float64)
    y = torch.zeros(5, dtype=torch.int64) if kind is cs.Classification else torch.zeros(5, 3).double()
    w = torch.tensor([1.0, 1, 1, 1, 0]).double()  # the last row is padding
    return task, module, cs.data.Batch(x, y, w, torch.tensor(7))


def plain(task, module, batch, losses, targets):
    """E_y of squared gradients, one example and one target at a time; targets are (y, probability) of an output."""
    params = {name: p.detach() for name, p in module.named_parameters()}
    total = torch.zeros(task.size, dtype=torch.float64)
    for x, w in zip(batch.x, batch.w, strict=True):
        for y, p in targets(module(x.unsqueeze(0)).detach()[0]):
            g = grad(lambda q, x=x, y=y: losses(functional_call(module, q, (x.unsqueeze(0),)), y))(params)
            total += w * p * torch.cat([g[name].flatten() for name in params]).square()
    return total / batch.w.sum()


@pytest.mark.parametrize("net", NETS)
def test_the_diagonal_is_the_expectation_over_all_labels(net):
    task, module, batch = case(net, cs.Classification)
    wanted = plain(
        task, module, batch, lambda out, y: nn.functional.cross_entropy(out[0], y),
        lambda out: zip(torch.arange(3), out.softmax(0), strict=True),
    )  # fmt: skip
    torch.testing.assert_close(curvature.diagonal_one(task, task.initial(), batch), wanted)
    torch.testing.assert_close(curvature._by_examples(task, task.initial(), batch), wanted)


def test_of_a_regression_it_is_the_squared_jacobian():
    task, module, batch = case("convolutions", cs.Regression)
    # targets one deviation off along each output, whose gradients are the rows of the Jacobian
    wanted = plain(task, module, batch, lambda out, y: (out[0] * y).sum(), lambda out: [(e, 1.0) for e in torch.eye(3)])
    torch.testing.assert_close(curvature.diagonal_one(task, task.initial(), batch), wanted)


@pytest.mark.parametrize("kind", [cs.MultiLabel, cs.Binary, cs.Classification, cs.Regression])
def test_roots_have_the_information_of_an_output(kind):
    """Σ_r s_r s_rᵀ is the Hessian of the loss in the output, which does not depend on y for these likelihoods."""
    likelihood = kind(nn.Linear(2, 3)).likelihood
    output = torch.randn(2, 1 if kind is cs.Binary else 3, generator=torch.Generator().manual_seed(0)).double()
    y = torch.zeros(2, dtype=torch.int64) if kind in (cs.Classification, cs.Binary) else torch.zeros(2, 3).double()
    roots = likelihood.roots(output)
    for row in range(2):

        def loss(at, row=row):
            return likelihood.losses(at.unsqueeze(0), y[row : row + 1]).sum()

        wanted = jacrev(grad(loss))(output[row])
        torch.testing.assert_close(torch.einsum("ri,rj->ij", roots[:, row], roots[:, row]), wanted)


@pytest.mark.parametrize("net", ["linear", "convolutions"])
def test_the_trace_of_kronecker_factors_of_one_place_is_that_of_the_diagonal(net):
    """tr(G ⊗ A) = tr G tr A of one example is Σ F of the last layer, which has one place."""
    task, _, batch = case(net, cs.Classification)
    one = cs.data.Batch(batch.x[:1], batch.y[:1], batch.w[:1], batch.key)
    last = curvature.kronecker_one(task, task.initial(), one)[-1]
    place, _ = list(curvature.product_layers(task).values())[-1]
    found = curvature.diagonal_one(task, task.initial(), one)[place].sum()
    torch.testing.assert_close(last.inputs.trace() * last.outputs.trace(), found)
