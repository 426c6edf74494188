"""Streams: each client's counts, and the network that it continues from."""

from collections.abc import Sequence

import torch
from torch import Tensor

from consilience.core import keys
from consilience.matching.clusters import Known
from consilience.matching.coordinates import Layer
from consilience.matching.networks import Memory, slice_of


def restart(
    layers: Sequence[Layer], memory: Memory, client: int, widths: Sequence[int], new: int, key: Tensor
) -> list[Layer]:
    """A client's network of `widths` for the next step. Its units are drawn from the global ones without replacement,
    in proportion to the client's counts (unused ones last, with equal probability); `new` units are zero."""
    padded, chosen = _with_zero_units(layers), []
    for h, (known, width) in enumerate(zip(memory.layers, widths, strict=True)):
        fresh, counts = min(new, width), known.counts[client].double()
        # The largest of log count + Gumbel noise are draws without replacement; 1e-12 stands for 0.
        uniform = keys.uniform(keys.fold(key, f"restart {h}").view(1), len(counts), torch.float64)[0]
        score = (counts + 1e-12).log() - (-uniform.clamp_min(1e-300).log()).log()
        drawn = score.topk(width - fresh).indices
        chosen.append(torch.cat([drawn, torch.full((fresh,), len(counts))]))
    return slice_of(padded, chosen)


def _with_zero_units(layers: Sequence[Layer]) -> list[Layer]:
    """A network with one more unit in every hidden layer, whose weights are all zero."""
    padded: list[Layer] = []
    for h, (weight, bias) in enumerate(layers):
        if h:
            below = len(layers[h - 1][0])
            grouped = weight.reshape(len(weight), below, -1)
            grouped = torch.cat([grouped, torch.zeros_like(grouped[:, :1])], dim=1)
            weight = grouped.reshape(len(weight), -1, *weight.shape[2:])
        if h < len(layers) - 1:
            weight = torch.cat([weight, torch.zeros_like(weight[:1])])
            bias = None if bias is None else torch.cat([bias, torch.zeros_like(bias[:1])])
        padded.append((weight, bias))
    return padded


def of_clients(memory: Memory, clients: Tensor) -> Memory:
    """A stream's memory with the counts of some clients only."""
    return Memory(tuple(Known(k.eta, k.lam, k.counts[clients], k.step) for k in memory.layers), memory.bias)


def merged(before: Memory | None, everyone: int, clients: Tensor, new: Memory) -> Memory:
    """A step's memory with the counts of all clients; absent ones keep theirs."""
    layers = []
    for h, known in enumerate(new.layers):
        counts = known.counts.new_zeros(everyone, known.counts.shape[1])
        if before is not None:
            old = before.layers[h].counts
            counts[:, : old.shape[1]] = old
        counts[clients] = known.counts
        layers.append(Known(known.eta, known.lam, counts, known.step))
    return Memory(tuple(layers), new.bias)
