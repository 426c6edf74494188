"""Recurrent layers of a cohort, step by step: torch's fused kernels exist for one set of weights only."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.compute.attention import linear
from consilience.compute.compiler import compiling
from consilience.compute.passes import Pass, handles, in_cohort
from consilience.compute.randomness import dropped

State = tuple[Tensor, ...]


def _lstm(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    h, c = state
    i, f, g, o = (gates + F.linear(h, weight, bias)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    (h,) = state
    (r, z, n), (hr, hz, hn) = gates.chunk(3, -1), F.linear(h, weight, bias).chunk(3, -1)
    r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
    n = (n + r * hn).tanh()
    return (n + z * (h - n),)


def _tanh(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    return ((gates + F.linear(state[0], weight, bias)).tanh(),)


def _relu(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    return ((gates + F.linear(state[0], weight, bias)).relu(),)


CELLS = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _tanh, "rnn_relu": _relu}


@handles(torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu)
def _recurrent(run: Pass, func: Any, x: Tensor, hx: Any, *rest: Any) -> Any:
    """torch's (input, states, weights, biased, layers, dropout, training, bidirectional, batch first). A packed
    sequence has other arguments and runs as it is."""
    if isinstance(hx, Tensor) and not hx.is_floating_point():  # the batch sizes of a packed sequence
        return func(x, hx, *rest)
    weights, biased, layers, rate, training, bidirectional, batch_first = rest
    start = hx if isinstance(hx, tuple | list) else (hx,)
    drops = rate > 0 and training
    if compiling():
        raise NotImplementedError("recurrent layers are not compiled: a graph would have every place of a sequence")
    if not drops and not in_cohort(x, *start, *weights):  # in training, because cuDNN has gradients only then
        return func(x, hx, weights, biased, layers, 0.0, True, bidirectional, batch_first)
    x = x.transpose(0, 1) if batch_first else x
    ways, each, ends = 1 + bidirectional, (4 if biased else 2), []
    has_projection = len(weights) == layers * ways * (each + 1)
    each += has_projection
    for layer in range(layers):
        outputs = []
        for way in range(ways):
            at = layer * ways + way
            own = weights[at * each : (at + 1) * each]
            out, end = _layer(run, CELLS[func.__name__], x, tuple(s[at] for s in start), own, biased, bool(way))
            outputs.append(out)
            ends.append(end)
        x = torch.cat(outputs, -1)
        if drops and layer < layers - 1:
            x = dropped(run, x, rate)
    states = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
    return (x.transpose(0, 1) if batch_first else x, *states)


def _layer(
    run: Pass, cell: Any, x: Tensor, state: State, weights: Sequence[Tensor], biased: bool, backwards: bool
) -> tuple[Tensor, State]:
    """One direction of one layer over [T, B, F]: (outputs [T, B, H], the last state)."""
    inner, outer, *others = weights
    bias = others[:2] if biased else (None, None)
    projection = others[-1] if len(others) % 2 else None
    gates = linear(run, F.linear, x, inner, bias[0])
    outputs = []
    for t in reversed(range(len(x))) if backwards else range(len(x)):
        state = cell(gates[t], state, outer, bias[1])
        if projection is not None:
            state = (F.linear(state[0], projection), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state
