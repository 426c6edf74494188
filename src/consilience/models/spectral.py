"""Layers whose weight is divided by its spectral norm (Miyato et al., 2018)."""

import copy
from typing import TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from consilience.core.errors import ConfigError

M = TypeVar("M", bound=nn.Module)
ITERATIONS = 10


def spectral_norm(module: M) -> M:
    """A copy whose linear layers and 2-d convolutions divide their weight W [out, in · kernel] by its largest singular
    value, by ten power iterations from a fixed vector. There is no state that clients would have to exchange, so the
    value is a lower bound, closer the smaller the second singular value."""
    made = copy.deepcopy(module)
    layers = [layer for layer in made.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    if not layers:
        raise ConfigError(f"{type(module).__name__} has no linear layers and convolutions to normalise")
    for layer in layers:
        if type(layer) not in KINDS:
            raise ConfigError(f"a {type(layer).__name__} may do more than its base does: normalise it yourself")
        generator = torch.Generator().manual_seed(len(layer.weight))
        layer.register_buffer("start", torch.randn(len(layer.weight), generator=generator))
        layer.__class__ = KINDS[type(layer)]
    return made


def largest_singular_value(weight: Tensor, start: Tensor) -> Tensor:
    """uᵀ W v of W [out, ...] as a matrix, with u and v, as constants, by power iterations from u = `start` [out]."""
    matrix = weight.flatten(1)
    u, fixed = F.normalize(start, dim=0), matrix.detach()
    v = F.normalize(u @ fixed, dim=0)
    for _ in range(ITERATIONS):
        u = F.normalize(fixed @ v, dim=0)
        v = F.normalize(u @ fixed, dim=0)
    value: Tensor = u @ matrix @ v
    return value


class SpectralLinear(nn.Linear):
    """A linear layer with the weight W / σ(W)."""

    start: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / largest_singular_value(self.weight, self.start), self.bias)


class SpectralConv2d(nn.Conv2d):
    """A convolution with the weight W / σ(W)."""

    start: Tensor

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight / largest_singular_value(self.weight, self.start)
        made: Tensor = self._conv_forward(x, weight, self.bias)
        return made


KINDS: dict[type, type] = {nn.Linear: SpectralLinear, nn.Conv2d: SpectralConv2d}
