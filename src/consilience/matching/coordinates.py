"""Units as rows of weights to layers in global coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.matching.clusters import Clusters, Units

Layer = tuple[Tensor, Tensor | None]
Network = Sequence[Layer]


@dataclass(frozen=True, eq=False)
class Placed:
    """A layer in global coordinates: by client the global unit of each of its units, and the precision [width] of its
    weights to the global units."""

    units: Sequence[Tensor]
    precision: Sequence[Tensor]

    @classmethod
    def alike(cls, precision: Tensor) -> Placed:
        """Inputs or outputs, which are the same units at all clients; precision [J, width]."""
        return cls([torch.arange(precision.shape[1])] * len(precision), list(precision))

    @classmethod
    def of(cls, clusters: Clusters, observe_missing: bool) -> Placed:
        """A hidden layer that has been matched."""
        everywhere = torch.full((len(clusters),), float(observe_missing), dtype=torch.float64)
        return cls(clusters.assignments, [everywhere.index_fill(0, mine, 1.0) for mine in clusters.assignments])

    @property
    def width(self) -> int:
        return len(self.precision[0])

    def columns(self, j: int, own: Tensor) -> Units:
        """Client j's weights `own` [units, its units of this layer, kernel], in a column for each global unit."""
        values = own.new_zeros(len(own), self.width, own.shape[2]).index_add_(1, self.units[j], own)
        # DP-means may merge a client's own units: their weights are averaged.
        values /= torch.bincount(self.units[j], minlength=self.width).clamp_min(1).view(1, -1, 1)
        return Units(values.flatten(1), self.precision[j].repeat_interleave(own.shape[2]))


def units_of(net: Network, j: int, h: int, below: Placed | None, above: Placed | None) -> Units:
    """Client j's hidden layer h: a row [incoming | bias | outgoing] a unit, with the weights to layers in global
    coordinates."""
    (weight, bias), onward = net[h], net[h + 1][0]
    parts = []
    if below:
        parts.append(below.columns(j, weight.reshape(len(weight), len(below.units[j]), -1)))
    if bias is not None:
        parts.append(Units(bias.unsqueeze(1), torch.ones(1, dtype=torch.float64)))
    if above:
        parts.append(above.columns(j, onward.reshape(len(onward), len(weight), -1).transpose(0, 1)))
    return Units(torch.cat([part.values for part in parts], dim=1), torch.cat([part.precision for part in parts]))


def columns_of(net: Network, h: int, below: int, above: int) -> list[int]:
    """How many columns of a unit of hidden layer h are incoming weights, biases and outgoing weights, if so many units
    below and above are in global coordinates."""
    kernels = [repeats(net, g) * math.prod(net[g][0].shape[2:]) for g in (h, h + 1)]
    return [below * kernels[0], int(net[h][1] is not None), above * kernels[1]]


def repeats(net: Network, h: int) -> int:
    """Inputs of layer h for each unit below: the positions of a channel that was flattened."""
    return net[h][0].shape[1] // len(net[h - 1][0]) if h else 1
