"""Convolutions as matrix products."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from consilience.compute.products import MatmulConv2d, MatmulConvTranspose2d, use_matmul_convolutions
from consilience.models import dcgan_discriminator, dcgan_generator, replace_batchnorm


def gradients(layer, x):
    """The value, and the gradients of a weighted sum of it in the input and the parameters."""
    x = x.clone().requires_grad_()
    out = layer(x)
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    return out, *torch.autograd.grad((weights * out).sum(), [x, *layer.parameters()])


def assert_same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": 1}, {"stride": (2, 1)}, {"padding": (2, 0), "dilation": (1, 2)}, {"bias": False}],
    ids=str,
)
def test_a_convolution_as_a_matrix_product_is_the_same_convolution(options):
    layer = nn.Conv2d(3, 4, (3, 2), **options).double()
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    assert MatmulConv2d.can_replace(layer)
    torch.testing.assert_close(MatmulConv2d(layer)(x), layer(x), rtol=1e-12, atol=1e-12)


def test_only_plain_convolutions_become_products():
    kept = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, padding="same"), nn.Conv1d(4, 4, 3))
    swapped = use_matmul_convolutions(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(*kept)))
    kinds = [type(layer).__name__ for layer in swapped.modules() if "Conv" in type(layer).__name__]
    assert kinds == ["MatmulConv2d", "Conv2d", "Conv2d", "Conv1d"]


def test_layers_with_hooks_are_left_to_them():
    seen, x = [], torch.randn(2, 3, 8, 8)

    def watch(layer, args, output):
        seen.append(output.shape)

    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    network[0].register_forward_hook(watch)
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(network[1])
    with torch.no_grad():
        network[1].weight_g.fill_(2.0)
    wanted = network(x)
    swapped = use_matmul_convolutions(network)
    assert [type(layer) for layer in swapped] == [nn.Conv2d, nn.Conv2d, MatmulConv2d]
    torch.testing.assert_close(swapped(x), wanted)
    assert seen == [(2, 4, 6, 6)] * 2


@pytest.mark.parametrize("size", [(14, 14), (9, 8), (7, 5)], ids=str)
def test_a_strided_convolution_has_the_same_gradients_as_a_matrix_product(size):
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 5, 2, 2).double()
    x = torch.randn(2, 2, *size, dtype=torch.float64)
    assert_same(gradients(MatmulConv2d(layer), x), gradients(layer, x))


@pytest.mark.parametrize(("size", "bias"), [((4, 4), True), ((7, 5), False), ((1, 3), True), ((1, 1), True)], ids=str)
def test_a_transposed_convolution_as_a_matrix_product_is_the_same_one(size, bias):
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(3, 2, 4, 2, 1, bias=bias).double()
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    assert MatmulConvTranspose2d.can_replace(layer)
    assert_same(gradients(MatmulConvTranspose2d(layer), x), gradients(layer, x))


def test_every_tap_of_a_transposed_convolution_goes_to_its_own_place():
    layer = nn.ConvTranspose2d(1, 1, 4, 2, 1, bias=False).double()
    layer.weight.data = torch.arange(1.0, 17, dtype=torch.float64).view(1, 1, 4, 4)
    x = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    x[0, 0, 1, 1] = 1
    out = MatmulConvTranspose2d(layer)(x)[0, 0]
    assert torch.equal(out[1:5, 1:5], layer.weight[0, 0])
    assert int((out != 0).sum()) == 16


def test_a_cohort_of_transposed_convolutions_is_that_of_each_client():
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(3, 2, 4, 2, 1).double()
    product = MatmulConvTranspose2d(layer)
    x = torch.randn(4, 2, 3, 3, 5, dtype=torch.float64)
    own = {name: torch.randn(4, *p.shape, dtype=torch.float64) for name, p in layer.named_parameters()}

    def loss(values, x):
        out = functional_call(product, values, (x,))
        return (out**3).sum(), out

    (in_values, in_x), out = vmap(grad(loss, argnums=(0, 1), has_aux=True))(own, x)
    for k in range(4):
        leaves = [t[k].clone().requires_grad_() for t in (own["weight"], own["bias"], x)]
        wanted = nn.functional.conv_transpose2d(leaves[2], leaves[0], leaves[1], stride=2, padding=1)
        g = torch.autograd.grad((wanted**3).sum(), leaves)
        assert_same([out[k], in_values["weight"][k], in_values["bias"][k], in_x[k]], [wanted, *g])


def chain(*modules):
    return nn.Sequential(*[child for module in modules for child in module])


def penalty(module):
    """One client's gradient penalty, mean (‖∂D/∂x‖ − 1)², as a function of its weights."""

    def loss(values, x):
        g = grad(lambda at: functional_call(module, values, (at,)).sum())(x)
        return (g.flatten(1).norm(dim=1) - 1).square().mean()

    return loss


@pytest.mark.parametrize("with_generator", [False, True])
def test_a_gradient_penalty_is_the_same_with_products(with_generator):
    torch.manual_seed(0)
    shape = (1, 28, 28)
    plain, x = dcgan_discriminator(shape, width=2), torch.randn(3, 2, *shape, dtype=torch.float64)
    if with_generator:  # the penalty in z goes through transposed convolutions too
        plain, x = (
            chain(replace_batchnorm(dcgan_generator(3, shape, width=2)), plain),
            torch.randn(3, 2, 3, dtype=torch.float64),
        )
    plain = plain.double()
    products = use_matmul_convolutions(copy.deepcopy(plain))
    assert not any(isinstance(layer, nn.Conv2d | nn.ConvTranspose2d) for layer in products.modules())
    own = {name: p + 0.1 * torch.randn(3, *p.shape, dtype=p.dtype) for name, p in plain.named_parameters()}
    found = vmap(grad(penalty(products)))(own, x)
    for k in range(3):
        values = {name: t[k].detach().requires_grad_() for name, t in own.items()}
        at = x[k].clone().requires_grad_()
        (g,) = torch.autograd.grad(functional_call(plain, values, (at,)).sum(), at, create_graph=True)
        value = (g.flatten(1).norm(dim=1) - 1).square().mean()
        wanted = torch.autograd.grad(value, list(values.values()), materialize_grads=True)
        largest = max(float(t.abs().max()) for t in wanted)
        for a, b in zip(found.values(), wanted, strict=True):
            torch.testing.assert_close(a[k], b, rtol=1e-11, atol=1e-13 * largest)


def test_products_keep_the_names_and_the_weights():
    module = dcgan_generator(3, (1, 28, 28), width=2)
    before = dict(module.named_parameters())
    after = dict(use_matmul_convolutions(module).named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is p for name, p in before.items())
    assert isinstance(use_matmul_convolutions(nn.ConvTranspose2d(1, 1, 4, 2, 1)), MatmulConvTranspose2d)


@pytest.mark.parametrize(
    "options",
    [
        *({"kernel_size": 3}, {"kernel_size": (4, 3)}, {"stride": 1}, {"padding": 0}, {"padding": (1, 2)}),
        *({"output_padding": 1}, {"groups": 2}, {"dilation": 2}),
    ],
    ids=str,
)
def test_other_transposed_convolutions_stay_as_they_are(options):
    layer = nn.ConvTranspose2d(4, 4, **{"kernel_size": 4, "stride": 2, "padding": 1} | options)
    assert use_matmul_convolutions(nn.Sequential(layer))[0] is layer
