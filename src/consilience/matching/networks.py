"""match: fuse several networks of the same depth into one, and infer its width."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core import DataError, record
from consilience.matching.beta_bernoulli import BetaBernoulli
from consilience.matching.clusters import Clusterer, Clusters, Known, Units

Layer = tuple[Tensor, Tensor | None]
Network = Sequence[Layer]
BIAS = 0.1  # prior mean of biases, and their initial value in the authors' code


@record
class Memory:
    """A stream's posterior after a step: the units of every hidden layer, and the output's bias, (η, λ)."""

    layers: tuple[Known, ...]
    bias: tuple[Tensor, Tensor] | None

    @property
    def step(self) -> Tensor:
        """The number of the next step."""
        return self.layers[0].step


@dataclass(frozen=True, eq=False)
class Matched:
    """The global network by layer, in the clients' format; the global unit of each unit of client j in hidden layer h,
    `assignments[h][j]` [L_j]; the objective after every update, by hidden layer; and the memory for the next step of a
    stream."""

    layers: list[Layer]
    assignments: list[list[Tensor]]
    traces: list[list[float]]
    memory: Memory

    @property
    def widths(self) -> list[int]:
        return [len(weight) for weight, _ in self.layers[:-1]]


def match(
    networks: Sequence[Network],
    how: Clusterer | None = None,
    *,
    shares: Tensor | None = None,
    observe_missing: bool = True,
    memory: Memory | None = None,
    seed: int = 0,
) -> Matched:
    """Match the hidden units of several clients' networks, and fuse those that are the same (PFNM).

    A network is a list of layers, from input to output: weight [out, in, …] and bias [out] (or None). Units may be
    neurons or channels: a kernel, or the positions of a channel in front of a linear layer, is a longer vector.
    `how` is `BetaBernoulli` unless given. `shares` [J, C] is the share of each class's examples that a client holds: it
    scales the precision of the client's weights to that class's output. Layers are matched from the top down, on bias
    and outgoing weights, the lowest also on incoming ones. A client's weights to global units that it does not have are
    observed zeros, or not observed without `observe_missing`."""
    how = how or BetaBernoulli()
    nets = _checked(networks, shares)
    if memory is not None and not _fits(memory, nets):
        raise DataError("the memory is of other networks: other clients, depth, inputs, outputs or biases")
    hidden, outputs = len(nets[0]) - 1, len(nets[0][-1][0])
    dtype, device = networks[0][0][0].dtype, networks[0][0][0].device
    above = [torch.arange(outputs) for _ in nets]
    known_above = outputs
    precision = list(torch.ones(len(nets), outputs).double() if shares is None else shares.double().cpu())
    bias, bias_state = _output_bias(nets, how, precision, memory)
    layers: list[Layer] = [(nets[0][-1][0], bias)]
    found: list[Clusters] = []
    states: list[Known] = []
    for h in reversed(range(hidden)):
        below = math.prod(nets[0][0][0].shape[1:]) if h == 0 else 0
        biased = nets[0][h][1] is not None
        units = [_units(net, h, a, known_above, p) for net, a, p in zip(nets, above, precision, strict=True)]
        mean = torch.zeros(units[0].values.shape[1], dtype=torch.float64)
        mean[below : below + biased] = BIAS
        known = None if memory is None else _grown(memory.layers[h], how, mean)
        clusters = how.cluster(units, mean, known, seed + h)
        incoming, b, outgoing = clusters.mean.split_with_sizes([below, int(biased), len(mean) - below - biased], dim=1)
        layers[0] = (_outgoing(outgoing, known_above, nets[0][h + 1][0]), layers[0][1])
        weight = incoming.reshape(len(clusters), *nets[0][0][0].shape[1:]) if h == 0 else incoming  # or with the next
        layers.insert(0, (weight, b.flatten() if biased else None))
        found.insert(0, clusters)
        states.insert(0, _remembered(clusters, known, len(nets)))
        above, known_above = clusters.assignments, len(clusters)
        precision = [_present(a, known_above, observe_missing) for a in above]
    return Matched(
        [(w.to(device, dtype), None if b is None else b.to(device, dtype)) for w, b in layers],
        [clusters.assignments for clusters in found],
        [clusters.trace for clusters in found],
        Memory(tuple(states), bias_state),
    )


def slice_of(matched: Sequence[Layer], assignments: Sequence[Tensor]) -> list[Layer]:
    """A client's part of a global network: the units `assignments[h]` of every hidden layer."""
    layers: list[Layer] = []
    before: Tensor | None = None
    for h, (weight, bias) in enumerate(matched):
        if before is not None:
            width = len(matched[h - 1][0])
            chosen = weight.reshape(len(weight), width, -1)[:, before]
            inputs = weight.shape[1] // width * len(before)
            weight = chosen.reshape(len(weight), inputs, *weight.shape[2:])
        if h < len(matched) - 1:
            before = assignments[h]
            weight, bias = weight[before], None if bias is None else bias[before]
        layers.append((weight, bias))
    return layers


def _checked(networks: Sequence[Network], shares: Tensor | None) -> list[list[Layer]]:
    """Networks in double precision on the CPU; an error if they cannot be matched."""
    if not networks:
        raise DataError("there is no network to match")
    depths = sorted({len(net) for net in networks})
    if len(depths) > 1 or depths[0] < 2:
        raise DataError(f"networks must have the same depth, at least one hidden layer; these have {depths} layers")
    nets = [[(_host(weight), None if bias is None else _host(bias)) for weight, bias in net] for net in networks]
    first = nets[0]
    for j, net in enumerate(nets):
        for h, ((weight, bias), (like, like_bias)) in enumerate(zip(net, first, strict=True)):
            where = f"layer {h + 1} of client {j}"
            if not len(weight):
                raise DataError(f"{where} has no units")
            values = weight if bias is None else torch.cat([weight.flatten(), bias])
            if not bool(values.isfinite().all()):
                raise DataError(f"{where} has weights that are not finite")
            if (bias is None) != (like_bias is None) or (bias is not None and len(bias) != len(weight)):
                raise DataError(f"{where}: every client's layer must have a bias for each unit, or none at all")
            if weight.dim() != like.dim() or weight.shape[2:] != like.shape[2:]:
                raise DataError(
                    f"{where} is a kernel of {tuple(weight.shape[2:])}, client 0's of {tuple(like.shape[2:])}"
                )
            if h == 0 and weight.shape != (len(weight), *like.shape[1:]):
                raise DataError(f"{where} takes {weight.shape[1]} inputs, client 0's takes {like.shape[1]}")
            if h and (weight.shape[1] % len(net[h - 1][0]) or _repeats(net, h) != _repeats(first, h)):
                raise DataError(f"{where} takes {weight.shape[1]} inputs from {len(net[h - 1][0])} units")
        if len(net[-1][0]) != len(first[-1][0]):
            raise DataError(f"client {j} has {len(net[-1][0])} outputs, client 0 has {len(first[-1][0])}")
    if shares is not None and shares.shape != (len(nets), len(first[-1][0])):
        wanted = (len(nets), len(first[-1][0]))
        raise DataError(f"shares must be clients × outputs, {wanted}, got {tuple(shares.shape)}")
    if shares is not None and not bool(((shares >= 0) & (shares < math.inf)).all()):
        raise DataError("shares must be finite and not negative")
    return nets


def _fits(memory: Memory, nets: Sequence[Network]) -> bool:
    """True if a stream can continue with these networks."""
    first = nets[0]
    if len(memory.layers) != len(first) - 1 or (memory.bias is None) != (first[-1][1] is None):
        return False
    widths = [*(len(known.eta) for known in memory.layers), len(first[-1][0])]
    sizes = [
        (math.prod(weight.shape[1:]) if h == 0 else 0)
        + (bias is not None)
        + widths[h + 1] * _repeats(first, h + 1) * math.prod(first[h + 1][0].shape[2:])
        for h, (weight, bias) in enumerate(first[:-1])
    ]
    return all(
        known.eta.shape[1] == size and len(known.counts) == len(nets)
        for known, size in zip(memory.layers, sizes, strict=True)
    )


def _host(weights: Tensor) -> Tensor:
    return weights.detach().to("cpu", torch.float64)


def _repeats(net: Network, h: int) -> int:
    """Inputs of layer h for each unit below: the positions of a channel that was flattened."""
    return net[h][0].shape[1] // len(net[h - 1][0])


def _units(net: Network, h: int, above: Tensor, width: int, precision: Tensor) -> Units:
    """A client's hidden layer h: a row [incoming (if lowest) | bias | outgoing] a unit, with outgoing weights in the
    columns of the global layer above, of `width`. Outgoing comes last: a wider layer above adds columns."""
    (weight, bias), onward = net[h], net[h + 1][0]
    own = onward.reshape(len(onward), len(weight), -1).transpose(0, 1)  # [units, units above, kernel]
    outgoing = own.new_zeros(len(weight), width, own.shape[2]).index_add_(1, above, own)
    outgoing /= torch.bincount(above, minlength=width).clamp_min(1).view(1, -1, 1)  # DP-means may merge a client's own
    parts = [*([weight.flatten(1)] if h == 0 else []), *([] if bias is None else [bias.unsqueeze(1)])]
    seen = torch.ones(sum(part.shape[1] for part in parts), dtype=torch.float64)
    return Units(
        torch.cat([*parts, outgoing.flatten(1)], dim=1), torch.cat([seen, precision.repeat_interleave(own.shape[2])])
    )


def _outgoing(values: Tensor, width: int, like: Tensor) -> Tensor:
    """The weight of the layer above, [width, units, …], from its columns by unit."""
    grouped = values.reshape(len(values), width, -1).transpose(0, 1)
    return grouped.reshape(width, -1, *like.shape[2:])


def _present(assignment: Tensor, width: int, observe_missing: bool) -> Tensor:
    if observe_missing:
        return torch.ones(width, dtype=torch.float64)
    return torch.zeros(width, dtype=torch.float64).index_fill_(0, assignment, 1.0)


def _output_bias(
    nets: Sequence[Network], how: Clusterer, precision: Sequence[Tensor], memory: Memory | None
) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
    """The posterior mean of the output's bias, and its natural parameters."""
    biases = [bias for _, bias in (net[-1] for net in nets) if bias is not None]
    if not biases:
        return None, None
    eta, lam = how.prior(torch.full_like(biases[0], BIAS))
    if memory is not None and memory.bias is not None:
        eta, lam = memory.bias
    for bias, seen in zip(biases, precision, strict=True):
        p = how.evidence(seen)
        eta, lam = eta + p * bias, lam + p
    return eta / lam, (eta, lam)


def _grown(known: Known, how: Clusterer, mean: Tensor) -> Known:
    """Known units in the coordinates of a layer above that may have become wider."""
    eta, lam = (t.expand(len(known.eta), -1).clone() for t in how.prior(mean))
    eta[:, : known.eta.shape[1]], lam[:, : known.lam.shape[1]] = known.eta, known.lam
    return Known(eta, lam, known.counts, known.step)


def _remembered(clusters: Clusters, known: Known | None, clients: int) -> Known:
    counts = torch.zeros(clients, len(clusters), dtype=torch.int64)
    if known is not None:
        counts[:, : known.counts.shape[1]] = known.counts
    for j, assignment in enumerate(clusters.assignments):
        counts[j, assignment] += 1
    step = torch.tensor(2) if known is None else known.step + 1
    return Known(clusters.eta, clusters.lam, counts, step)
