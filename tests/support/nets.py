"""Small networks and layers of units for the tests of matching, and what the brief says of them written out naively."""

from itertools import pairwise

import torch
from torch.nn import functional

from consilience.matching import Units

BIAS = 0.1


def draws(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def net(*sizes, seed=0, bias=True):
    """A random MLP: inputs, hidden widths, outputs."""
    pairs = list(pairwise(sizes))
    return [
        (draws(b, a, seed=97 * seed + h), draws(b, seed=97 * seed + 50 + h) if bias else None)
        for h, (a, b) in enumerate(pairs)
    ]


def conv_net(seed=0):
    """conv 2→4, conv 4→5, flatten (2 × 2 positions a channel), linear 20→6, linear 6→3: for images of 2 × 6 × 6."""
    shapes = [(4, 2, 3, 3), (5, 4, 3, 3), (6, 20), (3, 6)]
    return [(draws(*s, seed=97 * seed + h), draws(s[0], seed=97 * seed + 50 + h)) for h, s in enumerate(shapes)]


def forward(layers, x):
    """What a network computes, with a ReLU between layers."""
    for h, (weight, bias) in enumerate(layers):
        layer = functional.conv2d if weight.dim() == 4 else functional.linear
        x = layer(x if weight.dim() == 4 else x.flatten(1), weight, bias)
        x = x.relu() if h < len(layers) - 1 else x
    return x


def permuted(layers, seed):
    """The same function, its hidden units in another order; and the orders: unit l was unit order[l]."""
    made, orders, result = torch.Generator().manual_seed(seed), [], list(layers)
    for h in range(len(layers) - 1):
        (weight, bias), (onward, onward_bias) = result[h], result[h + 1]
        order = torch.randperm(len(weight), generator=made)
        repeats = onward.shape[1] // len(weight)
        columns = [int(unit) * repeats + position for unit in order for position in range(repeats)]
        result[h] = (weight[order], None if bias is None else bias[order])
        result[h + 1] = (onward[:, columns], onward_bias)
        orders.append(order)
    return result, orders


def federation(widths, size, seed=0, plain=False):
    """Clients' units of one layer: some coordinates known to all alike, some to each in its own way or not at all."""
    made = torch.Generator().manual_seed(1000 + seed)
    clients = []
    for j, width in enumerate(widths):
        precision = torch.rand(size, generator=made, dtype=torch.float64)
        precision[torch.rand(size, generator=made) < 0.3] = 0
        precision[: size // 2] = 1
        values = draws(width, size, seed=31 * seed + j)
        clients.append(Units(values, torch.ones_like(precision) if plain else precision))
    mean = torch.zeros(size, dtype=torch.float64)
    mean[size // 3] = BIAS
    return clients, mean


def summed(clients, assignments, model, mean, count, known=None):
    """S, P and m of every atom, one client and unit after the other; a client whose assignment is None is out."""
    s = (mean / model.prior_variance).repeat(count, 1)
    p = torch.full_like(s, 1 / model.prior_variance)
    if known is not None:
        s[: len(known.eta)], p[: len(known.lam)] = known.eta, known.lam
    m = [0] * count
    for units, assignment in zip(clients, assignments, strict=True):
        for unit, atom in enumerate([] if assignment is None else assignment.tolist()):
            s[atom] += units.values[unit] * units.precision / model.variance
            p[atom] += units.precision / model.variance
            m[atom] += 1
    return s, p, m


def worth(s, p):
    return float((s**2 / p).sum())
