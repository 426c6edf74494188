"""Networks as functions of the example's shape and the number of outputs, and GANs of the shape alone."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn

from consilience.core.errors import ConfigError
from consilience.models.gan import Pair, dcgan, mlp_gan
from consilience.models.lenet import lenet5
from consilience.models.resnet import resnet9, resnet18
from consilience.models.text import bag_of_words


def logistic(inputs: Sequence[int], outputs: int) -> nn.Module:
    """(Multinomial) logistic regression: one linear layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(inputs), outputs))


def mlp(inputs: Sequence[int], outputs: int, hidden: Sequence[int] = (200,), dropout: float = 0.0) -> nn.Module:
    """Linear layers with ReLU between, and dropout after each if asked for."""
    widths = [math.prod(inputs), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


def cnn(inputs: Sequence[int], outputs: int, channels: Sequence[int] = (32, 64), hidden: int = 128) -> nn.Module:
    """3×3 convolutions with ReLU, one 2×2 pooling, one hidden layer: the CNN of the EMNIST benchmarks."""
    if len(inputs) != 3:
        raise ConfigError(f"cnn needs images [channels, height, width], got examples of shape {tuple(inputs)}")
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


MODELS: dict[str, Callable[..., nn.Module] | Callable[..., Pair]] = {
    "bag_of_words": bag_of_words,
    "cnn": cnn,
    "dcgan": dcgan,
    "lenet5": lenet5,
    "logistic": logistic,
    "mlp": mlp,
    "mlp_gan": mlp_gan,
    "resnet9": resnet9,
    "resnet18": resnet18,
}
