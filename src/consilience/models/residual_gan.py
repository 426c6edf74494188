"""GANs of residual blocks and of plain convolutions, for square images (Miyato et al., 2018)."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from consilience.models.gan import Init, Pair, at_least_one, doublings, image_pair


def resnet_gan(
    inputs: Sequence[int],
    latent: int = 128,
    width: int = 256,
    critic_width: int = 128,
    init: Init = "orthogonal",
    spectral: bool = False,
) -> Pair:
    """Residual blocks of `width` channels in the generator, each doubling the side, and of `critic_width` in the
    discriminator, of which two halve it: 4.3 and 1.1 million weights at 32×32 in colour."""
    at_least_one(latent=latent, width=width, critic_width=critic_width)
    start, steps = doublings("resnet_gan", inputs)
    first = nn.Sequential(nn.Linear(latent, width * start**2), nn.Unflatten(1, (width, start, start)))
    ups = [Block(width, width, up=True) for _ in range(steps)]
    last = [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, inputs[0], 3, 1, 1), nn.Tanh()]
    downs = [
        Block(inputs[0], critic_width, down=True, first=True),
        Block(critic_width, critic_width, down=True),
        *(Block(critic_width, critic_width) for _ in range(2)),
    ]
    discriminator = nn.Sequential(*downs, nn.ReLU(), Total(), nn.Linear(critic_width, 1))
    return image_pair(nn.Sequential(first, *ups, *last), discriminator, latent, init, spectral)


def cnn_gan(
    inputs: Sequence[int], latent: int = 128, width: int = 64, init: Init = "normal", spectral: bool = False
) -> Pair:
    """Transposed convolutions of 8 · `width` to `width` channels in the generator, and twice as many convolutions and
    one more in the discriminator, every second of which halves the side: seven at 32×32."""
    at_least_one(latent=latent, width=width)
    start, steps = doublings("cnn_gan", inputs)
    channels = [width * 2**d for d in range(steps, -1, -1)]
    layers: list[nn.Module] = [
        nn.Sequential(nn.Linear(latent, channels[0] * start**2), nn.Unflatten(1, (channels[0], start, start)))
    ]
    for before, after in pairwise(channels):
        layers += [nn.BatchNorm2d(before), nn.ReLU(), nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False)]
    layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, inputs[0], 3, 1, 1), nn.Tanh()]
    judge: list[nn.Module] = [nn.Conv2d(inputs[0], width, 3, 1, 1), nn.LeakyReLU(0.1)]
    for before, after in pairwise(reversed(channels)):
        judge += [nn.Conv2d(before, after, 4, 2, 1), nn.LeakyReLU(0.1)]
        judge += [nn.Conv2d(after, after, 3, 1, 1), nn.LeakyReLU(0.1)]
    discriminator = nn.Sequential(*judge, nn.Flatten(), nn.Linear(channels[0] * start**2, 1))
    return image_pair(nn.Sequential(*layers), discriminator, latent, init, spectral)


class Block(nn.Module):
    """Two 3×3 convolutions and a skip connection. With `up` it doubles the side and has BatchNorm, with `down` it
    halves the side. The `first` of a discriminator begins with a convolution."""

    def __init__(self, before: int, after: int, up: bool = False, down: bool = False, first: bool = False) -> None:
        super().__init__()
        norms: tuple[nn.Module, nn.Module] = (nn.Identity(), nn.Identity())
        if up:
            norms = nn.BatchNorm2d(before), nn.BatchNorm2d(after)
        wider: nn.Module = nn.Upsample(scale_factor=2) if up else nn.Identity()
        narrower: nn.Module = nn.AvgPool2d(2) if down else nn.Identity()
        begin = [] if first else [norms[0], nn.ReLU()]
        self.layers = nn.Sequential(
            *begin, wider, nn.Conv2d(before, after, 3, 1, 1), norms[1], nn.ReLU(), nn.Conv2d(after, after, 3, 1, 1),
            narrower,
        )  # fmt: skip
        resized = [] if before == after and not up and not down else [nn.Conv2d(before, after, 1)]
        self.skip = nn.Sequential(wider, *([narrower, *resized] if first else [*resized, narrower]))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x) + self.skip(x)
        return made


class Total(nn.Module):
    """The sum over all pixels."""

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] to [B, C]."""
        return x.sum((-2, -1))
