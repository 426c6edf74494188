"""Our own GPU kernels against plain convolutions: interpreted on a CPU, as they are on a GPU."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.func import functional_call, vmap

from consilience.compute.products import PixelGroupNorm, use_kernels, use_matmul_convolutions
from consilience.models.resnet import PreactivationBlock

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytest.importorskip("triton", reason="Triton comes with torch for GPUs, and with the development tools")
from consilience.compute import kernels  # noqa: E402

# clients, batch, height, width, channels, channels made, taps, stride, padding
SHAPES = [
    (2, 1, 3, 3, 16, 16, 3, 1, 1),
    (1, 2, 5, 3, 16, 16, 3, 2, 1),  # odd sides: remainders by the stride differ in number
    (1, 2, 4, 4, 16, 16, 1, 2, 0),  # three pixels of four have no effect
    (1, 1, 6, 6, 3, 6, 5, 1, 2),  # few channels: taps and channels are one axis
    (1, 1, 4, 4, 48, 20, 3, 1, 0),
    (1, 1, 5, 5, 3, 8, 4, 2, 1),
    (1, 1, 3, 3, 16, 80, 3, 1, 1),  # more channels than a block
]


def draw(clients, batch, height, width, channels, made, taps, stride, padding):
    made_by = torch.Generator().manual_seed(taps)
    images = torch.randn(clients, batch, height, width, channels, generator=made_by)
    weights = torch.randn(clients, made, taps, taps, channels, generator=made_by) / (taps**2 * channels) ** 0.5
    return images.to(DEVICE), weights.to(DEVICE), stride, padding


def plainly(images, weights, stride, padding):
    """The same by torch, client by client, in float64."""
    clients = zip(images.double(), weights.double(), strict=True)
    each = [F.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), None, stride, padding) for x, w in clients]
    return torch.stack(each).permute(0, 1, 3, 4, 2)


def close(got, wanted):
    distance = (got.double() - wanted).norm() / wanted.norm()
    assert distance < (5e-3 if GPU else 1e-6), f"{distance:.2g} of the length"  # TF32 on a GPU


def check_convolution(shape):
    images, weights, stride, padding = draw(*shape)
    mine = [images.clone().requires_grad_(), weights.clone().requires_grad_()]
    theirs = [images.double().requires_grad_(), weights.double().requires_grad_()]
    result, wanted = kernels.convolve(*mine, stride, padding), plainly(*theirs, stride, padding)
    close(result, wanted)
    g = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for a, b in zip(torch.autograd.grad(result, mine, g), torch.autograd.grad(wanted, theirs, g.double()), strict=True):
        close(a, b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolutions_and_their_gradients_are_torch_s(shape):
    check_convolution(shape)


def test_sums_over_pixels_may_be_taken_in_shares(monkeypatch):
    monkeypatch.setattr(kernels.convolution, "PIXELS", 64)
    check_convolution((1, 2, 8, 8, 3, 8, 3, 1, 1))


def test_second_derivatives_are_torch_s():
    """The gradients of each function are the other two."""
    images, weights, stride, padding = draw(1, 1, 3, 3, 16, 16, 3, 2, 1)
    found = []
    for run, kind in ((kernels.convolve, torch.float32), (plainly, torch.float64)):
        x, w = (t.to(kind, copy=True).requires_grad_() for t in (images, weights))
        first = torch.autograd.grad(run(x, w, stride, padding).square().sum(), (x, w), create_graph=True)
        found.append(torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), (x, w)))
    for a, b in zip(*found, strict=True):
        close(a, b)


def test_vmap_joins_the_clients():
    images, weights, stride, padding = draw(*SHAPES[0])
    more, others = torch.stack([images, 2 * images]), torch.stack([weights, weights + 1])

    def run(x, w):
        return kernels.convolve(x, w, stride, padding)

    both = vmap(run)(more, others)
    same_weights = vmap(run, in_dims=(0, None))(more, weights)
    same_images = vmap(run, in_dims=(None, 0))(images, others)
    for i in range(2):
        close(both[i], plainly(more[i], others[i], stride, padding))
        close(same_weights[i], plainly(more[i], weights, stride, padding))
        close(same_images[i], plainly(images, others[i], stride, padding))


@pytest.mark.parametrize(
    ("groups", "shape", "affine", "relu"),
    [
        (2, (3, 12, 7), True, False),
        (4, (2, 8), False, True),
        (1, (1, 64, 9, 9), True, True),  # several blocks of pixels
    ],
    ids=str,
)
def test_norms_over_pixels_are_group_norms(groups, shape, affine, relu):
    torch.manual_seed(0)
    layer = nn.GroupNorm(groups, shape[1], affine=affine).double().to(DEVICE)
    if affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    mine = PixelGroupNorm(copy.deepcopy(layer).float(), relu)
    x = 3 + 2 * torch.randn(shape, device=DEVICE)
    g = torch.randn(shape, device=DEVICE)
    found = []
    for run, kind in ((mine, torch.float32), (lambda x: layer(x).relu() if relu else layer(x), torch.float64)):
        x = x.to(kind).requires_grad_()
        weights = list(mine.parameters() if run is mine else layer.parameters())
        result = run(x)
        found.append([result, *torch.autograd.grad(result, [x, *weights], g.to(kind))])
    (result, *gradients), (wanted, *theirs) = found
    torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_norms_of_large_numbers_keep_their_digits():
    """A mean of 1000 and a deviation of 1: the mean of squares less the square of the mean would lose it."""
    x = 1000 + torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    layer = nn.GroupNorm(2, 4).to(DEVICE)
    wanted = copy.deepcopy(layer).double()(x.to(DEVICE).double())
    torch.testing.assert_close(PixelGroupNorm(layer)(x.to(DEVICE)).double(), wanted, rtol=1e-3, atol=1e-3)


def test_norms_of_a_cohort_are_those_of_each_client():
    made = torch.Generator().manual_seed(0)
    x = torch.randn(2, 1, 4, 3, 3, generator=made).to(DEVICE)
    weights, biases = torch.randn(2, 2, 4, generator=made).to(DEVICE)
    g = torch.randn(x.shape, generator=made).to(DEVICE)
    layer = PixelGroupNorm(nn.GroupNorm(2, 4), relu=True)

    def run(x, w, b):
        return functional_call(layer, {"weight": w, "bias": b}, x)

    def plain(x, w, b):
        return F.group_norm(x, 2, w, b).relu()

    for dims in ((0, 0, 0), (0, None, None), (None, 0, 0)):
        given = [
            (t if d == 0 else t[0]).clone().requires_grad_() for t, d in zip((x, weights, biases), dims, strict=True)
        ]
        mine = vmap(run, in_dims=dims)(*given)
        each = [[t if d is None else t[k] for t, d in zip(given, dims, strict=True)] for k in range(2)]
        wanted = torch.stack([plain(*one) for one in each])
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
        gradients, theirs = torch.autograd.grad(mine, given, g), torch.autograd.grad(wanted, given, g)
        for a, b in zip(gradients, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", [4, 2])
def test_a_block_of_resnet18_v2_in_a_cohort_is_that_of_each_client(side):
    """Norms without scale and shift, zeros on one side only, and, in the last stage, one pixel."""
    made = torch.Generator().manual_seed(0)
    block = PreactivationBlock(4, 8, 2, 2, (side, side)).to(DEVICE)
    product = use_kernels(use_matmul_convolutions(copy.deepcopy(block)))
    weights = {name: torch.randn(2, *w.shape, generator=made).to(DEVICE) for name, w in block.named_parameters()}
    x = torch.randn(2, 3, 4, side, side, generator=made).to(DEVICE)
    g = torch.randn(2, 3, 8, side // 2, side // 2, generator=made).to(DEVICE)
    found = []
    for network in (product, block):
        given = {name: w.clone().requires_grad_() for name, w in weights.items()}

        def run(w, x, network=network):
            return functional_call(network, w, x)

        if network is block:
            out = torch.stack([run({name: w[k] for name, w in given.items()}, x[k]) for k in range(2)])
        else:
            out = vmap(run)(given, x)
        found.append([out.detach(), *torch.autograd.grad(out, list(given.values()), g)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, **({"rtol": 5e-2, "atol": 5e-2} if GPU else {"rtol": 1e-3, "atol": 1e-4}))


def test_a_norm_takes_the_relu_that_follows_it_unless_it_has_hooks():
    def network():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.GroupNorm(1, 4), nn.Tanh())

    joined = use_kernels(use_matmul_convolutions(network()))
    assert joined[1].relu
    assert type(joined[2]) is nn.Identity
    assert not joined[3].relu
    assert type(joined[4]) is nn.Tanh
    watched = network()
    watched[2].register_forward_hook(lambda *_: None)
    watched = use_kernels(use_matmul_convolutions(watched))
    assert not watched[1].relu
    assert type(watched[2]) is nn.ReLU


def test_convolutions_that_differ_along_the_axes_are_written_out():
    layers = [nn.Conv2d(3, 4, 3, stride=(1, 2)), nn.Conv2d(3, 4, 3, padding=(0, 1)), nn.Conv2d(3, 4, 3, dilation=2)]
    for layer in layers:
        product = use_kernels(use_matmul_convolutions(nn.Sequential(layer)))[0]
        assert not product.gathers
        x = torch.randn(2, 3, 9, 9)
        torch.testing.assert_close(product(x), layer(x), rtol=1e-4, atol=1e-5)
