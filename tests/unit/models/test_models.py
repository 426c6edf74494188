import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import consilience as cs
from consilience.compute.layers import check_layers
from consilience.core import keys
from consilience.core.errors import ConfigError
from consilience.data.batch import Batch
from consilience.models import (
    MODELS,
    Pair,
    cnn_gan,
    dcgan,
    dcgan_discriminator,
    dcgan_generator,
    lenet5,
    mlp_discriminator,
    mlp_gan,
    mlp_generator,
    resnet9,
    resnet18_v2,
    resnet20,
    resnet_gan,
    spectral_norm,
)
from consilience.models.resnet import Block, PreactivationBlock
from consilience.tasks.supervised import Classification


def parameters(module):
    return sum(p.numel() for p in module.parameters())


def small_resnet9(inputs, outputs):
    return resnet9(inputs, outputs, width=4)


def small_resnet18_v2(inputs, outputs):
    return resnet18_v2(inputs, outputs, width=4)


def small_resnet20(inputs, outputs):
    return resnet20(inputs, outputs, width=4)


def test_all_are_in_the_list():
    assert MODELS["lenet5"] is lenet5
    assert MODELS["resnet9"] is resnet9
    assert MODELS["resnet20"] is resnet20


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


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lenet5, (1, 28, 28)),
        (small_resnet9, (3, 16, 16)),
        (small_resnet18_v2, (3, 24, 24)),
        (small_resnet20, (3, 16, 16)),
    ],
)
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
        wanted = nn.utils.parameters_to_vector(torch.autograd.grad(value, list(alone.parameters())))
        torch.testing.assert_close(gradient[k], wanted, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(loss[k], value.detach(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("make", "shape"), [(lenet5, (1, 28, 28)), (small_resnet9, (3, 16, 16))])
def test_a_federation_learns_with_it(make, shape):
    torch.manual_seed(0)
    y = torch.arange(24) % 2
    data = cs.Dataset(torch.randn(24, *shape) + 2.0 * y.view(-1, 1, 1, 1) - 1, y, classes=("dark", "bright"))
    engine = cs.Simulator(device="cpu", chunk=3, workers=1, threads=1)
    runs = cs.fit(
        cs.FedAvg(cs.SGD(lr=0.05, epochs=2, batch_size=4)),
        Classification(make(shape, 2)),
        cs.partition.iid(data, 3, seed=0),
        rounds=3,
        engine=engine,
        progress=False,
    )
    assert runs.history[-1]["loss"] < runs.history[0]["loss"]


def small_dcgan(shape):
    return dcgan_generator(5, shape, width=2), dcgan_discriminator(shape, width=2)


def small_residuals(shape):
    pair = resnet_gan(shape, 5, 2, 2)
    return pair.generator, pair.discriminator


def small_cnns(shape):
    pair = cnn_gan(shape, 5, 2, spectral=True)
    return pair.generator, pair.discriminator


def small_mlps(shape):
    return mlp_generator(5, shape), mlp_discriminator(shape)


GANS = [
    *[(small_mlps, shape) for shape in [(2,), (1, 28, 28), (3, 32, 32)]],
    *[(make, shape) for make in (small_residuals, small_cnns) for shape in [(1, 28, 28), (3, 32, 32), (2, 8, 8)]],
    *[(small_dcgan, shape) for shape in [(1, 28, 28), (3, 32, 32), (1, 8, 8), (2, 20, 20), (1, 48, 48), (3, 64, 64)]],
]


@pytest.mark.parametrize(("make", "shape"), GANS)
def test_a_generator_makes_examples_and_a_discriminator_scores_them(make, shape):
    generator, discriminator = make(shape)
    made = generator(torch.randn(3, 5))
    assert made.shape == (3, *shape)
    assert discriminator(made).shape == (3, 1)
    check_layers(generator)
    check_layers(discriminator)


@pytest.mark.parametrize(("make", "shape"), GANS)
def test_what_a_sample_has_of_its_own_is_the_first_layer_or_the_last(make, shape):
    generator, discriminator = make(shape)
    first, last = generator[0], discriminator[-1]
    (weight, bias), z = first.parameters(), torch.randn(3, 5)
    assert weight.shape == (len(bias), 5)
    torch.testing.assert_close(first(z).flatten(1), z @ weight.T + bias)
    assert isinstance(last, nn.Linear)
    assert last.out_features == 1


@pytest.mark.parametrize("odd", [1, 3])
def test_a_dcgan_may_have_any_width(odd):
    made = dcgan_generator(4, (1, 28, 28), width=odd)(10 * torch.randn(2, 4))
    assert bool((made.abs() <= 1).all())
    assert dcgan_discriminator((1, 28, 28), width=odd)(made).shape == (2, 1)


@pytest.mark.parametrize(
    ("module", "size"),
    [
        (mlp_generator(16, (2,)), (16 * 32 + 32) + 64 + (32 * 32 + 32) + 64 + (32 * 2 + 2)),
        (mlp_discriminator((2,)), (2 * 32 + 32) + (32 * 32 + 32) + (32 + 1)),
        (mlp_generator(16, (2,), hidden=()), 16 * 2 + 2),
        (mlp_discriminator((1, 2, 3), hidden=(7,)), (6 * 7 + 7) + (7 + 1)),
        (dcgan_generator(100, (1, 28, 28)), 6272 * 101 + 2 * 128 + 16 * 128 * 64 + 2 * 64 + (16 * 64 + 1)),
        (dcgan_generator(100, (3, 32, 32)), 1_073_027),
        (dcgan_discriminator((1, 28, 28)), (25 * 64 + 64) + (25 * 64 * 128 + 128) + (49 * 128 + 1)),
        (dcgan_discriminator((3, 32, 32)), 1_033_345),
        (resnet_gan((3, 32, 32)).generator, 4_276_739),
        (resnet_gan((3, 32, 32)).discriminator, 1_053_825),
    ],
)
def test_gans_have_the_weights_that_one_counts(module, size):
    assert parameters(module) == size


def test_a_dcgan_halves_its_channels_as_it_doubles_its_side():
    generator, x, seen = dcgan_generator(7, (3, 32, 32), width=2), torch.randn(1, 7), []
    for layer in generator:
        x = layer(x)
        seen += [tuple(x.shape[1:])] if not seen or tuple(x.shape[1:]) != seen[-1] else []
    assert seen == [(8, 4, 4), (4, 8, 8), (2, 16, 16), (3, 32, 32)]
    assert [type(layer) for layer in generator[1:4]] == [nn.BatchNorm2d, nn.ReLU, nn.ConvTranspose2d]
    for layer in dcgan_discriminator((3, 32, 32), width=2)[:-2]:
        x = layer(x)
        seen += [tuple(x.shape[1:])] if tuple(x.shape[1:]) != seen[-1] else []
    assert seen[4:] == [(2, 16, 16), (4, 8, 8), (8, 4, 4)]


@pytest.mark.parametrize("shape", [(1, 28, 32), (1, 30, 30), (1, 9, 9), (1, 7, 7), (1, 2, 2), (1, 36, 36)])
def test_images_that_a_dcgan_cannot_reach_by_doubling_are_refused(shape):
    message = rf"needs square images whose side is 4, 5, 6 or 7 doubled one or more times, got {shape[1]}×{shape[2]}"
    with pytest.raises(ConfigError, match=f"^dcgan_generator {message}$"):
        dcgan_generator(5, shape)
    with pytest.raises(ConfigError, match=f"^dcgan_discriminator {message}$"):
        dcgan_discriminator(shape)


@pytest.mark.parametrize("init", ["normal", "orthogonal", "default"])
def test_initial_weights_are_normal_or_orthogonal_as_asked(init):
    pair = dcgan((3, 32, 32), width=16, init=init)
    for module in (pair.generator, pair.discriminator):
        layers = [p for name, p in module.named_parameters() if name.endswith("weight") and p.dim() > 1]
        biases = [p for name, p in module.named_parameters() if name.endswith("bias")]
        if init == "normal":
            flat = torch.cat([p.flatten() for p in layers])
            torch.testing.assert_close(flat.std(), torch.tensor(0.02), rtol=0.02, atol=0)
        for p in layers if init == "orthogonal" else ():
            matrix = p.detach().flatten(1)
            matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
            torch.testing.assert_close(matrix @ matrix.T, torch.eye(len(matrix)), rtol=0, atol=1e-4)
        assert all(not p.any() for p in biases) is (init != "default")
    with pytest.raises(ConfigError, match="init is 'normal', 'orthogonal' or 'default', got 'none'"):
        dcgan((3, 32, 32), init="none")


def test_spectral_norm_divides_weights_by_their_largest_singular_value():
    torch.manual_seed(0)
    plain = dcgan_discriminator((1, 8, 8), width=4)
    normed = spectral_norm(plain)
    for before, after in zip(plain, normed, strict=True):
        if isinstance(before, nn.Linear | nn.Conv2d):
            before.weight.data = before.weight.data / torch.linalg.matrix_norm(before.weight.data.flatten(1), 2)
            torch.testing.assert_close(after.weight.shape, before.weight.shape)
    x = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(normed(x), plain(x), rtol=0.1, atol=0.02)
    large = spectral_norm(nn.Sequential(nn.Linear(6, 5)))
    matrix = large[0].weight.detach()
    u, s, v = torch.linalg.svd(matrix)
    s = s * torch.tensor([4.0, 1.0, 1.0, 1.0, 1.0])  # a gap, so that ten iterations are exact
    large[0].weight.data = (u * s) @ v[:5]
    found = (large(v[:1]) - large[0].bias).detach()
    assert float(found.norm()) == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(ConfigError, match="no linear layers and convolutions"):
        spectral_norm(nn.Sequential(nn.ReLU()))


def test_a_dcgan_refuses_what_is_no_image():
    with pytest.raises(ConfigError, match=r"dcgan_generator needs images \[channels, height, width\], .* \(784,\)"):
        dcgan_generator(5, (784,))
    with pytest.raises(ConfigError, match=r"dcgan_discriminator needs images \[channels, .* \(28, 28\)"):
        dcgan_discriminator((28, 28))


def test_the_list_has_whole_gans_and_no_player_alone():
    assert not any("generator" in name or "discriminator" in name for name in MODELS)
    assert (MODELS["dcgan"], MODELS["mlp_gan"]) == (dcgan, mlp_gan)


@pytest.mark.parametrize(("make", "shape"), [(dcgan, (1, 8, 8)), (mlp_gan, (2,)), (mlp_gan, (1, 8, 8))])
def test_a_gan_is_a_pair_of_players_that_fit(make, shape):
    pair = make(shape, latent=3)
    assert isinstance(pair, Pair)
    assert pair.latent == 3
    assert pair.discriminator(pair.generator(torch.randn(4, 3))).shape == (4, 1)


@pytest.mark.parametrize(
    ("make", "sizes", "message"),
    [
        (dcgan, {"latent": 0}, "latent must be at least 1, got 0"),
        (dcgan, {"width": -1}, "width must be at least 1, got -1"),
        (mlp_gan, {"latent": -2}, "latent must be at least 1, got -2"),
    ],
)
def test_players_of_no_size_are_refused(make, sizes, message):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        make((1, 8, 8), **sizes)


def test_a_discriminator_knows_how_far_a_point_is():
    torch.manual_seed(0)
    discriminator = mlp_discriminator((2,))
    near, far = discriminator(torch.tensor([[10.0, 5.0], [10_000.0, 5_000.0]])).flatten()
    assert abs(far) > 100 * abs(near)


def test_resnets_have_batchnorm_where_it_is_asked_for():
    for make in (resnet9, cs.models.resnet18, resnet20):
        layers = list(make((3, 32, 32), 10, width=4, norm="batch").modules())
        assert any(isinstance(layer, nn.BatchNorm2d) for layer in layers)
        assert not any(isinstance(layer, nn.GroupNorm) for layer in layers)
        with pytest.raises(ConfigError, match="norm is 'group' or 'batch', got 'layer'"):
            make((3, 32, 32), 10, width=4, norm="layer")


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize(("outputs", "size"), [(10, 272_474), (100, 278_324)])
def test_resnet20_has_the_known_number_of_weights(norm, outputs, size):
    assert parameters(resnet20((3, 32, 32), outputs, norm=norm)) == size


def test_resnet20_has_twenty_layers_beside_its_skips_and_three_stages():
    module, x, seen = resnet20((3, 32, 32), 100), torch.randn(2, 3, 32, 32), []
    for layer in module:
        x = layer(x)
        seen += [tuple(x.shape[1:])] if isinstance(layer, Block) else []
    assert seen == [stage for stage in [(16, 32, 32), (32, 16, 16), (64, 8, 8)] for _ in range(3)]
    assert x.shape == (2, 100)
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert sum(isinstance(layer, nn.Linear) or layer.kernel_size == (3, 3) for layer in layers) == 20
    assert {layer.num_groups for layer in module.modules() if isinstance(layer, nn.GroupNorm)} == {2}


def test_resnet18_v2_has_the_authors_number_of_weights_and_stages():
    module, x, seen = resnet18_v2((3, 24, 24), 100), torch.randn(2, 3, 24, 24), []
    for layer in module:
        x = layer(x)
        seen += [tuple(x.shape[1:])] if type(layer) in (nn.Conv2d, nn.MaxPool2d, PreactivationBlock) else []
    assert parameters(module) == 11_218_212
    stages = [(64, 6, 6), (128, 3, 3), (256, 2, 2), (512, 1, 1)]
    assert seen == [(64, 12, 12), (64, 6, 6), *(stage for stage in stages for _ in range(2))]
    assert x.shape == (2, 100)


def test_resnet18_v2_starts_with_logits_of_zero_and_convolutions_of_a_cut_normal():
    module = resnet18_v2((3, 24, 24), 100)
    assert not module(torch.randn(3, 3, 24, 24)).any()
    convolutions = [layer.weight for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == 20
    # A standard normal, cut at ±2, has this standard deviation.
    wanted = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))
    for weight in convolutions:
        scaled = weight.detach() * math.sqrt(weight[0].numel())
        assert scaled.abs().max() <= 2
        assert scaled.std() == pytest.approx(wanted, rel=0.03)
        assert abs(scaled.mean()) < 4 / math.sqrt(weight.numel())


def test_resnet18_v2_norms_have_no_weights_and_every_skip_of_a_new_shape_has_one():
    module = resnet18_v2((3, 24, 24), 100)
    norms = [layer for layer in module.modules() if isinstance(layer, nn.GroupNorm)]
    assert {(layer.num_groups, layer.affine, layer.eps) for layer in norms} == {(2, False, 1e-3)}
    skips = [block.skip for block in module if isinstance(block, PreactivationBlock)]
    shapes = [[type(layer) for layer in skip] if isinstance(skip, nn.Sequential) else [] for skip in skips]
    assert shapes == [[], [], *([nn.Conv2d, nn.GroupNorm], []) * 3]


@pytest.mark.parametrize("side", [6, 7, 12, 13, 24, 25])
def test_its_windows_lie_as_in_jax_and_tensorflow(side):
    """With padding "SAME" window i begins at i · stride − ⌊padding / 2⌋, and a pooling does not see the padding."""
    module, x = resnet18_v2((1, side, side), 2, width=2), torch.randn(1, 1, side, side)
    kernel = next(layer for layer in module if isinstance(layer, nn.Conv2d)).weight.detach()[0, 0]
    out = -(-side // 2)
    before = max((out - 1) * 2 + 7 - side, 0) // 2
    padded = torch.zeros(side + 14, side + 14)
    padded[before : before + side, before : before + side] = x[0, 0]
    wanted = torch.tensor(
        [[float((kernel * padded[2 * i : 2 * i + 7, 2 * j : 2 * j + 7]).sum()) for j in range(out)] for i in range(out)]
    )
    seen = x
    for layer in module:
        seen = layer(seen)
        if isinstance(layer, nn.Conv2d):
            torch.testing.assert_close(seen[0, 0].detach(), wanted, rtol=1e-4, atol=1e-5)
        if isinstance(layer, nn.MaxPool2d):
            break
    half = -(-out // 2)
    before = max((half - 1) * 2 + 3 - out, 0) // 2
    for i in range(half):
        for j in range(half):
            rows, columns = (slice(max(2 * p - before, 0), 2 * p - before + 3) for p in (i, j))
            torch.testing.assert_close(seen[0, 0, i, j].detach(), wanted[rows, columns].max(), rtol=1e-4, atol=1e-5)
