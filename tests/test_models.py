import copy

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import consilience as cs
from consilience import keys
from consilience.errors import ConfigError
from consilience.models import MODELS, lenet5, resnet9
from consilience.task import Batch, Classification


def parameters(module):
    return sum(p.numel() for p in module.parameters())


def small_resnet9(inputs, outputs):
    return resnet9(inputs, outputs, width=4)


def test_both_are_in_the_list():
    assert MODELS["lenet5"] is lenet5
    assert MODELS["resnet9"] is resnet9


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 28, 28), (1, 32, 32), (3, 32, 32), (1, 28, 36), (1, 12, 12)])
def test_lenet5_takes_grey_and_coloured_images(shape):
    assert lenet5(shape, 7)(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(("shape", "size"), [((1, 28, 28), 61_706), ((1, 32, 32), 61_706), ((3, 32, 32), 62_006)])
def test_lenet5_has_the_number_of_weights_that_one_knows(shape, size):
    assert parameters(lenet5(shape, 10)) == size


@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 96, 96), (1, 28, 28), (3, 8, 8)])
def test_resnet9_takes_images_of_many_sizes(shape):
    assert small_resnet9(shape, 7)(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("side", [32, 96])
def test_resnet9_is_as_big_as_the_original_but_for_the_last_bias(side):
    assert parameters(resnet9((3, side, side), 10)) == 6_573_120 + 10


def test_resnet9_has_nine_layers_with_weights_and_groupnorm_alone():
    layers = list(resnet9((3, 32, 32), 10).modules())
    assert sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in layers) == 9
    assert sum(isinstance(layer, nn.GroupNorm) for layer in layers) == 8
    assert not any(isinstance(layer, _BatchNorm) for layer in layers)


@pytest.mark.parametrize(
    ("make", "shape", "message"),
    [
        (lenet5, (1, 11, 28), r"images of 11×28 are too small for lenet5: it needs 12×12 or more"),
        (lenet5, (784,), r"lenet5 needs images \[channels, height, width\], got examples of shape \(784,\)"),
        (resnet9, (3, 7, 32), r"images of 7×32 are too small for resnet9: it needs 8×8 or more"),
        (resnet9, (784,), r"resnet9 needs images \[channels, height, width\], got examples of shape \(784,\)"),
    ],
)
def test_other_examples_are_refused(make, shape, message):
    with pytest.raises(ConfigError, match=message):
        make(shape, 10)


@pytest.mark.parametrize(("make", "shape"), [(lenet5, (1, 28, 28)), (small_resnet9, (3, 16, 16))])
def test_a_cohort_is_trained_as_its_clients_one_by_one(make, shape):
    torch.manual_seed(0)
    module = make(shape, 5)
    task = Classification(module).prepare(dtype=torch.float64)
    theta = task.initial() + 0.05 * torch.randn(3, task.size, dtype=torch.float64)
    x, y = torch.randn(3, 4, *shape, dtype=torch.float64), torch.randint(5, (3, 4))
    key = keys.key(0, purpose="test", client=torch.arange(3))
    gradient, loss = task.gradient()(theta, Batch(x, y, torch.ones(3, 4, dtype=torch.float64), key))
    for k in range(3):
        alone = copy.deepcopy(module).double()
        nn.utils.vector_to_parameters(theta[k], alone.parameters())
        value = nn.functional.cross_entropy(alone(x[k]), y[k])
        slope = nn.utils.parameters_to_vector(torch.autograd.grad(value, list(alone.parameters())))
        torch.testing.assert_close(gradient[k], slope, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(loss[k], value.detach(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("make", "shape"), [(lenet5, (1, 28, 28)), (small_resnet9, (3, 16, 16))])
def test_a_federation_learns_with_it(make, shape):
    torch.manual_seed(0)
    y = torch.arange(24) % 2
    data = cs.Dataset(torch.randn(24, *shape) + 2.0 * y.view(-1, 1, 1, 1) - 1, y, ("dark", "bright"))
    engine = cs.Simulator(device="cpu", workers=1)
    runs = cs.fit(
        cs.FedAvg(cs.SGD(lr=0.05, epochs=2, batch=4)),
        Classification(make(shape, 2)),
        cs.partition.iid(data, 3, seed=0),
        rounds=3,
        engine=engine,
        progress=False,
    )
    assert runs.history[-1]["loss"] < runs.history[0]["loss"]
