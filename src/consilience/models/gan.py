"""Generators and discriminators for GANs. Those of images have BatchNorm in the generator and no normalisation in the
discriminator.

The first child of a generator and the last child of a discriminator are linear. Several posterior samples share all
other layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar

from torch import nn

from consilience.core.errors import ConfigError
from consilience.models.spectral import spectral_norm

Init = Literal["normal", "orthogonal", "default"]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class Pair:
    """The networks of an `Adversarial` task: the generator takes noise [B, latent] to examples, the discriminator
    examples to one number each."""

    generator: nn.Sequential
    discriminator: nn.Sequential
    latent: int


def mlp_gan(inputs: Sequence[int], latent: int = 8, hidden: Sequence[int] = (32, 32)) -> Pair:
    """A GAN of linear layers for examples of any shape: `mlp_generator` and `mlp_discriminator`."""
    at_least_one(latent=latent)
    return Pair(mlp_generator(latent, inputs, hidden), mlp_discriminator(inputs, hidden), latent)


def dcgan(
    inputs: Sequence[int], latent: int = 100, width: int = 64, init: Init = "normal", spectral: bool = False
) -> Pair:
    """A GAN of convolutions for square images in (−1, 1): `dcgan_generator` and `dcgan_discriminator`, with initial
    weights as in `initialised`. `spectral` divides the discriminator's weights by their norms (`spectral_norm`)."""
    at_least_one(latent=latent, width=width)
    players = dcgan_generator(latent, inputs, width), dcgan_discriminator(inputs, width)
    return image_pair(*players, latent, init, spectral)


def image_pair(generator: nn.Sequential, discriminator: nn.Sequential, latent: int, init: Init, spectral: bool) -> Pair:
    """The pair with initial weights as in `initialised`, and `spectral_norm` in the discriminator if asked for."""
    generator, discriminator = initialised(generator, init), initialised(discriminator, init)
    return Pair(generator, spectral_norm(discriminator) if spectral else discriminator, latent)


def initialised(module: M, how: Init = "normal") -> M:
    """The module with new weights of its linear layers and convolutions, in place: "normal" draws N(0, 0.02²),
    "orthogonal" orthogonal matrices, both with biases 0; "default" keeps PyTorch's."""
    if how not in ("normal", "orthogonal", "default"):
        raise ConfigError(f"init is 'normal', 'orthogonal' or 'default', got {how!r}")
    for layer in module.modules() if how != "default" else ():
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            if how == "normal":
                nn.init.normal_(layer.weight, 0.0, 0.02)
            else:
                nn.init.orthogonal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module


def mlp_generator(latent: int, outputs: Sequence[int], hidden: Sequence[int] = (32, 32)) -> nn.Sequential:
    """Noise [B, latent] to examples [B, *outputs]: linear layers with LayerNorm and ReLU between."""
    widths = [latent, *hidden, math.prod(outputs)]
    layers: list[nn.Module] = [nn.Linear(latent, widths[1])]
    for before, after in pairwise(widths[1:]):
        layers += [nn.LayerNorm(before), nn.ReLU(), nn.Linear(before, after)]
    return nn.Sequential(*layers, nn.Unflatten(1, tuple(outputs)))


def mlp_discriminator(inputs: Sequence[int], hidden: Sequence[int] = (32, 32)) -> nn.Sequential:
    """Examples [B, *inputs] to scores [B, 1]: linear layers with LeakyReLU(0.2) between. There is no LayerNorm,
    which removes the distance from the origin: with it WGAN-GP did not find four Gaussians in the plane."""
    widths = [math.prod(inputs), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


def dcgan_generator(latent: int, outputs: Sequence[int], width: int = 64) -> nn.Sequential:
    """Noise [B, latent] to images [B, C, H, W] in (−1, 1): the DCGAN (Radford et al., 2016).

    At 32×32 the channels are 4 · `width` at 4×4, then 2 · `width`, `width` and C, by transposed 4×4 convolutions that
    double the side. The paper's first layer, a transposed convolution of one pixel, is a linear layer."""
    start, steps = doublings("dcgan_generator", outputs)
    channels = [width * 2**d for d in reversed(range(steps))]
    first = nn.Linear(latent, channels[0] * start**2)
    layers: list[nn.Module] = [nn.Sequential(first, nn.Unflatten(1, (channels[0], start, start)))]
    for before, after in pairwise(channels):
        layers += [nn.BatchNorm2d(before), nn.ReLU(), nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False)]
    return nn.Sequential(
        *layers, nn.BatchNorm2d(width), nn.ReLU(), nn.ConvTranspose2d(width, outputs[0], 4, 2, 1), nn.Tanh()
    )


def dcgan_discriminator(inputs: Sequence[int], width: int = 64) -> nn.Sequential:
    """Images [B, C, H, W] to scores [B, 1]: 5×5 convolutions of stride 2, as many as `dcgan_generator` has transposed
    ones, to `width`, 2 · `width`, … channels, with LeakyReLU(0.2) and no normalisation, and a linear layer."""
    end, halvings = doublings("dcgan_discriminator", inputs)
    channels = [width * 2**h for h in range(halvings)]
    layers: list[nn.Module] = [nn.Conv2d(inputs[0], width, 5, 2, 2), nn.LeakyReLU(0.2)]
    for before, after in pairwise(channels):
        layers += [nn.Conv2d(before, after, 5, 2, 2), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * end**2, 1))


def need_images(name: str, shape: Sequence[int]) -> None:
    """Refuse examples that are not images."""
    if len(shape) != 3:
        raise ConfigError(f"{name} needs images [channels, height, width], got examples of shape {tuple(shape)}")


def at_least_one(**sizes: int) -> None:
    """Refuse sizes below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} must be at least 1, got {size}")


def doublings(name: str, shape: Sequence[int]) -> tuple[int, int]:
    """The (s, m) of a side s · 2^m with 4 ≤ s ≤ 7 and m ≥ 1."""
    need_images(name, shape)
    _, height, width = shape
    steps = height.bit_length() - 3
    if height != width or steps < 1 or height % 2**steps:
        raise ConfigError(
            f"{name} needs square images whose side is 4, 5, 6 or 7 doubled one or more times, got {height}×{width}"
        )
    return height >> steps, steps
