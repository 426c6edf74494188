"""Gaussian in, Gaussian out: against draws, and where the answer is known."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import consilience as cs
from consilience.inference import sigmoid_moments
from consilience.models.npn import FLOOR, NPN, GaussianLinear, ReLU, Sigmoid, Tanh, npn

ACTIVATIONS = {
    "sigmoid": (Sigmoid(), torch.sigmoid),
    "tanh": (Tanh(), torch.tanh),
    "relu": (ReLU(), torch.relu),
}
activations = pytest.mark.parametrize(("layer", "plain"), ACTIVATIONS.values(), ids=ACTIVATIONS)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def grid(means=5.0, low=-3.0, high=1.5):
    """Means × variances, in float64."""
    mean = torch.linspace(-means, means, 41, dtype=torch.float64).unsqueeze(1)
    var = torch.logspace(low, high, 30, dtype=torch.float64)
    return (part.contiguous() for part in torch.broadcast_tensors(mean, var))


def integrated(plain, mean, var):
    """Moments of plain(x), x ~ N(mean, var), on a fine grid."""
    t = torch.linspace(-10, 10, 8001, dtype=torch.float64)
    weight = (-t.square() / 2).softmax(0)
    value = plain(mean.unsqueeze(-1) + var.sqrt().unsqueeze(-1) * t)
    centre = (value * weight).sum(-1)
    return centre, ((value - centre.unsqueeze(-1)).square() * weight).sum(-1)


# Linear


def test_a_linear_layer_is_exact_for_independent_inputs():
    layer = GaussianLinear(3, 2).double()
    mean, var = noise(5, 3), noise(5, 3, seed=1).exp()
    found = layer(mean, var)
    torch.testing.assert_close(found[0], nn.functional.linear(mean, layer.weight, layer.bias))
    for row, spread in zip(var, found[1], strict=True):
        torch.testing.assert_close(spread, (layer.weight @ row.diag() @ layer.weight.T).diagonal())


def test_without_variance_a_linear_layer_is_the_usual_one():
    layer = GaussianLinear(3, 2)
    mean, var = layer(torch.ones(3), torch.zeros(3))
    torch.testing.assert_close(mean, layer.weight.sum(1) + layer.bias)
    assert not var.any()


# Activations


@pytest.mark.parametrize("mean", [-8.0, -2.0, -0.3, 0.0, 0.5, 3.0, 9.0])
@pytest.mark.parametrize("var", [0.01, 1.0, 20.0])
def test_relu_is_exact(mean, var):
    mean, var = (torch.tensor(value, dtype=torch.float64) for value in (mean, var))
    deviation = var.sqrt()

    def integral(power):  # substitution x = deviation · t from the kink on, so that the grid sees none
        t = torch.linspace(float(-mean / deviation), float((-mean / deviation).clamp_min(0)) + 12, 200_001).double()
        weight = (-t.square() / 2).exp() / math.sqrt(2 * math.pi)
        return torch.trapezoid((mean + deviation * t) ** power * weight, t)

    centre = integral(1)
    found = ReLU()(mean, var)
    torch.testing.assert_close(found[0], centre, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(found[1], (integral(2) - centre.square()).clamp_min(FLOOR), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize(("kind", "bounds"), [(Sigmoid, (0.014, 0.03)), (Tanh, (0.04, 0.12))])
def test_sigmoid_and_tanh_are_near_the_integral(kind, bounds):
    mean, var = grid()
    plain = torch.sigmoid if kind is Sigmoid else torch.tanh
    for got, wanted, bound in zip(kind()(mean, var), integrated(plain, mean, var), bounds, strict=True):
        assert (got - wanted).abs().max() < bound


@activations
def test_without_variance_an_activation_is_the_plain_function(layer, plain):
    x = torch.linspace(-6, 6, 101)
    mean, var = layer(x, torch.zeros_like(x))
    torch.testing.assert_close(mean, plain(x), rtol=1e-5, atol=1e-6)
    assert var.min() >= FLOOR


@activations
def test_ends_of_float32_are_finite_with_gradients(layer, plain):
    means = torch.tensor([0.0, 1e-20, 1e-6, 0.1, 1.0, 5.0, 13.0, 40.0, 1e3, 1e6, 1e12])
    variances = torch.tensor([0.0, 1e-30, 1e-12, 1e-6, 1e-3, 1.0, 1e3, 1e6, 1e12])
    mean, var = torch.cartesian_prod(torch.cat([-means, means]), variances).T
    inputs = mean.clone().requires_grad_(), var.clone().requires_grad_()
    out, spread = layer(*inputs)
    assert out.isfinite().all()
    assert spread.isfinite().all()
    assert (spread >= FLOOR).all()
    for value in (out, spread):
        for gradient in torch.autograd.grad(value.sum(), inputs, retain_graph=True):
            assert gradient.isfinite().all()


def test_relu_keeps_its_digits_in_the_tails_in_float32():
    mean, var = grid(means=60.0, high=2.5)
    mean, var = mean.float(), var.float()
    for got, wanted in zip(ReLU()(mean, var), ReLU()(mean.double(), var.double()), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=5e-4, atol=1e-7)


def test_relu_at_a_mean_of_zero_has_the_gradient_one_half():
    mean, var = torch.zeros((), requires_grad=True), torch.ones(())
    out, spread = ReLU()(mean, var)
    assert float(torch.autograd.grad(out, mean, retain_graph=True)[0]) == pytest.approx(0.5)
    near = [ReLU()(torch.tensor(at, dtype=torch.float64), var.double())[1] for at in (-1e-4, 1e-4)]
    assert float(torch.autograd.grad(spread, mean)[0]) == pytest.approx(float(near[1] - near[0]) / 2e-4, rel=1e-4)


@activations
def test_gradients_are_those_of_finite_differences(layer, plain):
    mean, var = noise(6).requires_grad_(), noise(6, seed=1).exp().requires_grad_()
    assert torch.autograd.gradcheck(layer, (mean, var))


# Networks


@activations
def test_a_network_of_independent_units_has_the_moments_of_its_draws(layer, plain):
    """The first layer gives every hidden unit an input of its own: the assumption of all layers holds."""
    network = npn(6, 6, 5, layer).double()
    first, _, last = network.layers
    with torch.no_grad():
        first.weight.copy_(noise(6, seed=3).diag())
        first.bias.zero_()
        last.weight.copy_(noise(5, 6, seed=4))
        mean, var = noise(6), 0.3 * noise(6, seed=1).exp()
        x = mean + var.sqrt() * noise(50_000, 6, seed=2)
        y = plain(x @ first.weight.T) @ last.weight.T + last.bias
        found = network(mean, var)
    if isinstance(layer, ReLU):
        torch.testing.assert_close(found, (y.mean(0), y.var(0)), rtol=0.04, atol=0.02)
        return
    assert (found[0] - y.mean(0)).abs().max() < 0.04
    # Errors of the hidden units' variances: at most 0.03 for a sigmoid, and four times that for tanh.
    most = last.weight.square().sum(1) * (0.12 if isinstance(layer, Tanh) else 0.03)
    assert ((found[1] - y.var(0)).abs() < most).all()


def test_the_network_of_fednp_has_two_linear_layers_and_a_sigmoid_between():
    network = npn(10, 4, 30)
    assert isinstance(network, NPN)
    assert [type(layer) for layer in network.layers] == [GaussianLinear, Sigmoid, GaussianLinear]
    assert sum(p.numel() for p in network.parameters()) == 10 * 4 + 4 + 4 * 30 + 30


@activations
def test_a_cohort_of_networks_is_its_clients_one_by_one(layer, plain):
    network = npn(3, 4, 5, layer).double()
    weights = {name: p.detach() + 0.1 * noise(2, *p.shape) for name, p in network.named_parameters()}
    mean, var = noise(2, 3), noise(2, 3, seed=1).exp()

    def loss(weights, mean, var):
        out, spread = functional_call(network, weights, (mean, var))
        return (out.square() + spread - spread.log()).sum()

    together = vmap(grad(loss))(weights, mean, var)
    for k in range(2):
        alone = grad(loss)({name: p[k] for name, p in weights.items()}, mean[k], var[k])
        for name in alone:
            torch.testing.assert_close(together[name][k], alone[name])


def predicted(task, theta, f, mean, var):
    """As in FedNP: tilt the cavity, and let the network say what weights follow."""
    out, spread = task.call_one("npn", theta, *sigmoid_moments(f, mean, var))
    return (out.square() + spread - spread.log()).mean()


def cohort(layer, clients=3, hidden=4):
    torch.manual_seed(0)
    task = cs.Classification(nn.Linear(2, 2)).extend(npn=npn(3, hidden, 6, layer))
    theta = task.initial() + 0.1 * noise(clients, task.size).float()
    return task, (theta, noise(clients, 1).float(), noise(clients, 3).float(), noise(clients, 3).float().exp())


@activations
def test_as_a_part_of_a_task_a_cohort_is_its_clients_one_by_one(layer, plain):
    task, case = cohort(layer)
    together = task.gradient(predicted)(*case)
    assert together[0][:, task.slice("npn")].any()
    for k in range(3):
        alone = task.gradient(predicted)(*(part[k : k + 1] for part in case))
        for got, wanted in zip(together, alone, strict=True):
            torch.testing.assert_close(got[k : k + 1], wanted, rtol=1e-4, atol=1e-6)
