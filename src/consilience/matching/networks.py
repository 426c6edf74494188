"""match: fuse several networks of the same depth into one, and infer its width."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core import DataError, record
from consilience.matching.beta_bernoulli import BetaBernoulli
from consilience.matching.clusters import Clusterer, Clusters, Known
from consilience.matching.coordinates import Layer, Network, Placed, columns_of, repeats, units_of

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
    top_down: bool = False,
    observe_missing: bool = True,
    memory: Memory | None = None,
    seed: int = 0,
) -> Matched:
    """Match the hidden units of several clients' networks, and fuse those that are the same (PFNM).

    A network is a list of layers, from input to output: weight [out, in, …] and bias [out] (or None). Units may be
    neurons or channels: a kernel, or the positions of a channel in front of a linear layer, is a longer vector.
    `how` is `BetaBernoulli` unless given.

    Layers are matched one after another. Units are compared by their biases and by their weights to neighbouring layers
    that are in global coordinates already. From the bottom up these are the incoming weights; `top_down`, the paper's
    order, the outgoing ones. The last layer of either order has both, so that every weight is compared once. A client's
    weights to global units that it does not have are observed zeros, or not observed without `observe_missing`.

    `shares` [J, C] are the clients' shares of the examples of each class, n_jc / n_c: a client's weights to output c
    have the precision (n_jc / n_c) / σ², all others 1 / σ²."""
    how = how or BetaBernoulli()
    nets = _checked(networks, shares)
    if memory is not None and not _fits(memory, nets, top_down):
        raise DataError("the memory is of other networks: other clients, depth, inputs, outputs, biases, or the order")
    hidden, inputs, outputs = len(nets[0]) - 1, nets[0][0][0].shape[1], len(nets[0][-1][0])
    seen = torch.ones(len(nets), outputs).double() if shares is None else shares.double().cpu()
    output_bias, bias_state = _output_bias(nets, how, list(seen), memory)
    weights, biases = [weight for weight, _ in nets[0]], [*[None] * hidden, output_bias]
    placed = {-1: Placed.alike(torch.ones(len(nets), inputs).double()), hidden: Placed.alike(seen)}
    found: dict[int, Clusters] = {}
    states: dict[int, Known] = {}
    for h in reversed(range(hidden)) if top_down else range(hidden):
        below, above = placed.get(h - 1), placed.get(h + 1)
        units = [units_of(net, j, h, below, above) for j, net in enumerate(nets)]
        columns = columns_of(nets[0], h, below.width if below else 0, above.width if above else 0)
        mean = torch.zeros(sum(columns), dtype=torch.float64)
        mean[columns[0] : columns[0] + columns[1]] = BIAS
        known = None if memory is None else _grown(memory.layers[h], how, mean, None if top_down else columns[0])
        found[h] = clusters = how.cluster(units, mean, known, seed + h)
        states[h] = _remembered(clusters, known, len(nets))
        incoming, b, outgoing = clusters.mean.split_with_sizes(columns, dim=1)
        if below:
            weights[h] = incoming.reshape(len(clusters), -1, *weights[h].shape[2:])
        if above:
            grouped = outgoing.reshape(len(clusters), above.width, -1).transpose(0, 1)
            weights[h + 1] = grouped.reshape(above.width, -1, *weights[h + 1].shape[2:])
        biases[h] = b.flatten() if columns[1] else None
        placed[h] = Placed.of(clusters, observe_missing)
    like = networks[0][0][0]
    return Matched(
        [(w.to(like), None if b is None else b.to(like)) for w, b in zip(weights, biases, strict=True)],
        [found[h].assignments for h in range(hidden)],
        [found[h].trace for h in range(hidden)],
        Memory(tuple(states[h] for h in range(hidden)), bias_state),
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
            if h and (weight.shape[1] % len(net[h - 1][0]) or repeats(net, h) != repeats(first, h)):
                raise DataError(f"{where} takes {weight.shape[1]} inputs from {len(net[h - 1][0])} units")
        if len(net[-1][0]) != len(first[-1][0]):
            raise DataError(f"client {j} has {len(net[-1][0])} outputs, client 0 has {len(first[-1][0])}")
    if shares is not None and shares.shape != (len(nets), len(first[-1][0])):
        wanted = (len(nets), len(first[-1][0]))
        raise DataError(f"shares must be clients × outputs, {wanted}, got {tuple(shares.shape)}")
    if shares is not None and not bool(((shares >= 0) & (shares < math.inf)).all()):
        raise DataError("shares must be finite and not negative")
    return nets


def _fits(memory: Memory, nets: Sequence[Network], top_down: bool) -> bool:
    """True if a stream can continue with these networks."""
    first, hidden = nets[0], len(nets[0]) - 1
    if len(memory.layers) != hidden or (memory.bias is None) != (first[-1][1] is None):
        return False
    widths = [first[0][0].shape[1], *(len(known.eta) for known in memory.layers), len(first[-1][0])]
    for h, known in enumerate(memory.layers):
        below = widths[h] if h == 0 or not top_down else 0
        above = widths[h + 2] if h == hidden - 1 or top_down else 0
        if known.eta.shape[1] != sum(columns_of(first, h, below, above)) or len(known.counts) != len(nets):
            return False
    return True


def _host(weights: Tensor) -> Tensor:
    return weights.detach().to("cpu", torch.float64)


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


def _grown(known: Known, how: Clusterer, mean: Tensor, end: int | None) -> Known:
    """Known units in the coordinates of a layer that may have become wider: its last columns, those before `end`, are
    new, and have their prior."""
    size, more = len(known.eta), len(mean) - known.eta.shape[1]
    at = (len(mean) if end is None else end) - more
    eta, lam = (
        torch.cat([old[:, :at], prior[at : at + more].expand(size, -1), old[:, at:]], dim=1)
        for old, prior in zip((known.eta, known.lam), how.prior(mean), strict=True)
    )
    return Known(eta, lam, known.counts, known.step)


def _remembered(clusters: Clusters, known: Known | None, clients: int) -> Known:
    counts = torch.zeros(clients, len(clusters), dtype=torch.int64)
    if known is not None:
        counts[:, : known.counts.shape[1]] = known.counts
    for j, assignment in enumerate(clusters.assignments):
        counts[j, assignment] += 1
    step = torch.tensor(2) if known is None else known.step + 1
    return Known(clusters.eta, clusters.lam, counts, step)
