"""Clouds of points, small pictures, and a small network of features."""

import math

import torch
from torch import Tensor, nn

from consilience.data.dataset import Dataset

RING = torch.stack([torch.tensor([math.cos(a), math.sin(a)]) for a in torch.arange(8) * math.pi / 4]) * 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def examples(x: Tensor, y: Tensor | None = None) -> Dataset:
    return Dataset(x, torch.zeros(len(x), dtype=torch.int64) if y is None else y)


def clouds(each: int, centres: Tensor = RING, deviation: float = 0.1, seed: int = 0) -> tuple[Tensor, Tensor]:
    y = torch.arange(len(centres)).repeat_interleave(each)
    return centres[y] + deviation * normal(len(y), centres.shape[1], seed=seed), y


def pictures(n: int, *, channels: int = 1, side: int = 6, seed: int = 0) -> Dataset:
    made = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (n, channels, side, side), generator=made).byte()
    scale, shift = torch.full((channels, 1, 1), 1 / 255 / 0.3), torch.full((channels, 1, 1), -0.4 / 0.3)
    return Dataset(x, torch.zeros(n, dtype=torch.int64), scale=scale, shift=shift, name="pictures")


def everything(data: Dataset) -> Tensor:
    return data.inputs(torch.arange(len(data)))


class Small(nn.Module):
    """Bytes to a few features, and a count of the images it saw."""

    num_features = 5

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.layer = nn.Linear(108, 5)
        nn.init.normal_(self.layer.weight, generator=torch.Generator().manual_seed(3))
        nn.init.zeros_(self.layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        assert images.dtype == torch.uint8
        self.seen += len(images)
        return self.layer(images.flatten(1) / 255)


def plainly(kind):
    """A judge whose scores have no numbers of samples in their names."""

    class Plain(kind):
        def __call__(self, samples, real):
            return {name.partition("@")[0]: value for name, value in super().__call__(samples, real).items()}

    return Plain
