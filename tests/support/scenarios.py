"""Small federations with known answers, shared by all tests."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import consilience as cs

NAMES = ("Basel", "Bern", "Chur", "Genf", "Zug")
SIZES = (7, 3, 1, 12, 5)


def linear(
    sizes: Sequence[int] = SIZES,
    names: Sequence[str] | None = NAMES,
    features: int = 3,
    seed: int = 0,
    spread: float = 0.0,
) -> tuple[cs.Regression, cs.Federation]:
    """Noisy points on a plane, shared out among clients; a linear model that starts at zero. With `spread`, the slopes
    of clients differ by this standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), features, generator=generator)
    y = x @ torch.arange(1.0, features + 1).unsqueeze(1) - 2 + 0.1 * torch.randn(len(x), 1, generator=generator)
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    if spread:
        own = spread * torch.randn(len(sizes), features, generator=generator)
        y = y + (x * own[owner]).sum(1, keepdim=True)
    module = nn.Linear(features, 1)
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return cs.Regression(module), cs.Federation.from_owner(cs.Dataset(x, y, name="plane"), owner, names=names)


def gradient(data: cs.Dataset, theta: Tensor) -> Tensor:
    """∇ of the mean of ½(y − w·x − b)² at θ = (w, b): what `linear` descends on the examples `data`."""
    ones = torch.cat([data.x, torch.ones(len(data), 1)], dim=1)
    return ones.T @ (ones @ theta.unsqueeze(1) - data.y).squeeze(1) / len(data)


def likelihood(federation: cs.Federation, k: int | None = None) -> cs.Gaussian:
    """What the examples of `linear`'s client k, of everyone when None, say of θ = (w, b): Π exp(−½(y − w·x − b)²)."""
    start, stop = (0, federation.examples) if k is None else federation.offsets[k : k + 2].tolist()
    data = federation.data[federation.order[start:stop]]
    x = torch.cat([data.x, torch.ones(len(data), 1)], dim=1).double()
    return cs.Gaussian(x.mT @ data.y[:, 0].double(), x.mT @ x)


def blobs(clients: int = 6, each: int = 20, seed: int = 0) -> tuple[cs.Classification, cs.Federation, cs.Federation]:
    """Three well separated clouds of points; (task, training clients, the same clients' test points).
    Client k holds class k mod 3 and a few of the others."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.arange(clients).repeat_interleave(each) % 3
    other = torch.randint(3, (clients * each,), generator=generator)
    y = torch.where(torch.rand(clients * each, generator=generator) < 0.8, own, other)
    centres = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])
    x = centres[y] + 0.3 * torch.randn(clients * each, 2, generator=generator)
    data = cs.Dataset(x, y, classes=("red", "green", "blue"), name="blobs")
    federation = cs.Federation.from_owner(data, torch.arange(clients).repeat_interleave(each))
    module = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    train, test = federation.split(0.25, seed=seed)
    return cs.Classification(module), train, test
