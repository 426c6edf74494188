"""Several generators, or several discriminators, that share all but one layer."""

import copy
import zlib

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Generators(nn.Module):
    """Several generators that share all but their first layer; generator i mod count makes example i."""

    def __init__(self, module: nn.Sequential, count: int) -> None:
        super().__init__()
        first, *rest = module
        self.heads, self.trunk = _copies(first, count), nn.Sequential(*rest)

    def forward(self, z: Tensor) -> Tensor:
        """Noise [B, latent] to examples [B, ...]."""
        count = len(self.heads)
        padded = F.pad(z, (0, 0, 0, -len(z) % count))
        made = torch.stack([head(padded[i::count]) for i, head in enumerate(self.heads)], 1)
        out: Tensor = self.trunk(made.flatten(0, 1)[: len(z)])
        return out


class Heads(nn.Module):
    """The last layers of several discriminators that share all others."""

    def __init__(self, last: nn.Module, count: int) -> None:
        super().__init__()
        self.heads = _copies(last, count)

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, ...] to every discriminator's scores [count, B]."""
        return torch.stack([head(features).reshape(len(features)) for head in self.heads])


def _copies(module: nn.Module, count: int) -> nn.ModuleList:
    """The module, and others like it: weight matrices are drawn with its own mean and deviation, vectors are copies. A
    hash of its weights is the seed."""
    found = [module]
    seed = zlib.crc32(b"".join(p.detach().cpu().numpy().tobytes() for p in module.parameters()))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count - 1):
        other = copy.deepcopy(module)
        for p in other.parameters():
            if p.dim() > 1:
                noise = torch.randn(p.shape, generator=generator).to(p)
                p.data = p.data.mean() + p.data.std(correction=0) * noise
        found.append(other)
    return nn.ModuleList(found)
