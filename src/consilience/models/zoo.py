"""Networks as functions of the example's shape and the number of outputs, and GANs of the shape alone."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn

from consilience.core.errors import ConfigError
from consilience.models.acoustic import acoustic
from consilience.models.gan import Pair, dcgan, mlp_gan, need_images
from consilience.models.residual_gan import cnn_gan, resnet_gan
from consilience.models.resnet import resnet9, resnet18, resnet18_v2, resnet20
from consilience.models.survival import proportional_hazards
from consilience.models.text import bag_of_words
from consilience.models.transformer import transformer, vit


def logistic(inputs: Sequence[int], outputs: int, bias: bool = True) -> nn.Module:
    """(Multinomial) logistic regression: one linear layer. Cox's model has no `bias`: the baseline takes its place."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(inputs), outputs, bias))


def mlp(inputs: Sequence[int], outputs: int, hidden: Sequence[int] = (200,), dropout: float = 0.0) -> nn.Module:
    """Linear layers with ReLU between, and dropout after each if asked for."""
    widths = [math.prod(inputs), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


def cnn(inputs: Sequence[int], outputs: int, channels: Sequence[int] = (32, 64), hidden: int = 128) -> nn.Module:
    """3×3 convolutions with ReLU, one 2×2 pooling, one hidden layer: the CNN of the EMNIST benchmarks."""
    need_images("cnn", inputs)
    depth, height, width = inputs
    layers: list[nn.Module] = []
    for after in channels:
        layers += [nn.Conv2d(depth, after, 3), nn.ReLU()]
        depth, height, width = after, height - 2, width - 2
    flat = depth * (height // 2) * (width // 2)
    if flat < 1:
        raise ConfigError(f"images of {inputs[1]}×{inputs[2]} are too small for {len(channels)} convolutions")
    return nn.Sequential(
        *layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(flat, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


def lenet5(inputs: Sequence[int], outputs: int) -> nn.Module:
    """LeNet-5 for images of 28×28 or 32×32 (LeCun et al., 1998), in its common modern form.

    Two 5×5 convolutions (6 and 16 channels), each with ReLU and 2×2 max pooling, then layers of 120 and 84. Images
    below 32 pixels get a border of 2, so 28×28 is the paper's 32×32. The paper has tanh, pooling with weights, a
    second convolution that sees a part of the channels, and radial basis functions at the end."""
    need_images("lenet5", inputs)
    depth, *sides = inputs
    border = 2 if min(sides) < 32 else 0
    height, width = (((side + 2 * border - 4) // 2 - 4) // 2 for side in sides)
    if min(height, width) < 1:
        raise ConfigError(f"images of {sides[0]}×{sides[1]} are too small for lenet5: it needs 12×12 or more")
    return nn.Sequential(
        nn.Conv2d(depth, 6, 5, padding=border), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16 * height * width, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs),
    )  # fmt: skip


MODELS: dict[str, Callable[..., nn.Module] | Callable[..., Pair]] = {
    network.__name__: network
    for network in (
        acoustic, bag_of_words, cnn, cnn_gan, dcgan, lenet5, logistic, mlp, mlp_gan, proportional_hazards, resnet9,
        resnet18, resnet18_v2, resnet20, resnet_gan, transformer, vit,
    )
}  # fmt: skip
