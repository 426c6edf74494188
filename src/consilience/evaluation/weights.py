"""A summary of the posterior's marginals of single weights, for the report."""

import math
from typing import Any

import torch
from torch import Tensor

from consilience.core.gaussian import Gaussian
from consilience.evaluation.uncertainty import histogram
from consilience.tasks.task import Task

BINS = 30
MAX_TENSORS = 12  # with histograms of their own
EXAMPLES = 8  # single weights
RANKED = 1_000_000  # weights, about, that determine the range of a histogram

Place = tuple[str, slice, torch.Size]
"""A parameter's name, place in the flat vector, and shape."""


def marginals(task: Task, q: Gaussian) -> dict[str, Any] | None:
    """Statistics of the marginals N(m, sd²) of a posterior: histograms of log₁₀ sd and of log₁₀ |m|/sd, over all
    weights and by parameter; the share of weights with |m| > 2 sd, whose sign is known; and some single weights.
    None if no marginal is finite."""
    mean, sd = q.mean.detach().cpu(), q.variance.detach().cpu().sqrt()
    if mean.dim() != 1 or not bool((mean.isfinite() & sd.isfinite() & (sd > 0)).any()):
        return None
    ratio = mean.abs() / sd
    columns = {"sd": sd.log10(), "ratio": ratio.clamp_min(1e-12).log10()}
    edges = {name: _edges(values) for name, values in columns.items()}

    def counts(part: slice) -> dict[str, list[int]]:
        return {name: histogram(values[part], edges[name]) for name, values in columns.items()}

    places = _places(task) if len(mean) == task.size else []
    largest = sorted(places, key=lambda place: place[2].numel(), reverse=True)[:MAX_TENSORS]
    steps = max(1, min(EXAMPLES, len(mean)) - 1)
    chosen = sorted({round(i * (len(mean) - 1) / steps) for i in range(steps + 1)})
    return {
        "weights": len(mean),
        "known": (ratio > 2).double().mean().item(),
        "edges": {name: found.tolist() for name, found in edges.items()},
        "all": counts(slice(None)),
        "tensors": [{"name": p[0], "shape": list(p[2]), **counts(p[1])} for p in places if p in largest],
        "of_tensors": len(places),
        "examples": [{"name": _weight(places, i), "mean": mean[i].item(), "sd": sd[i].item()} for i in chosen],
    }


def _places(task: Task) -> list[Place]:
    start, found = task.slice().start, []
    for name, shape in zip(task.main.names, task.main.shapes, strict=True):
        found.append((name, slice(start, start + shape.numel()), shape))
        start += shape.numel()
    return found


def _weight(places: list[Place], index: int) -> str:
    """The name of one weight: 0.weight[3, 7]."""
    for name, part, shape in places:
        if part.start <= index < part.stop:
            at = torch.unravel_index(torch.tensor(index - part.start), shape) if shape else ()
            return f"{name}[{', '.join(str(int(i)) for i in at)}]" if shape else name
    return f"weight {index}"


def _edges(values: Tensor) -> Tensor:
    """Bins between the quantiles 0.002 and 0.998; values beyond them go into the outermost bins."""
    finite = values[values.isfinite()]
    some = finite[:: math.ceil(len(finite) / RANKED)].double()
    low, high = (float(end) for end in some.quantile(torch.tensor([0.002, 0.998], dtype=torch.float64)))
    room = 0.5 if high - low < 0.1 else 0.02 * (high - low)
    return torch.linspace(low - room, high + room, BINS + 1, dtype=torch.float64)
