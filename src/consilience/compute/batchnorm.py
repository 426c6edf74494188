"""BatchNorm for clients: statistics of a batch without its padding, and sums from which a federation finds its own."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.compute.passes import Moments, Pass, handles, in_cohort
from consilience.core import TaskError


def _weights(x: Tensor, w: Tensor) -> Tensor:
    """The weights of the rows of x. A module may fold further axes into that of the examples, as frames of a film."""
    if len(x) % len(w):
        raise TaskError(
            f"a BatchNorm layer sees {len(x)} rows of a batch of {len(w)} examples: keep the examples on the first axis"
        )
    return w if len(x) == len(w) else w.repeat_interleave(len(x) // len(w))


def _columns(values: Tensor, x: Tensor) -> Tensor:
    """Values [C] that broadcast against x [B, C, ...]."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


def moments(x: Tensor, w: Tensor) -> tuple[Moments, Tensor]:
    """The mean and variance [C] of x [B, C, ...] over examples of weight w [B] and all places, and the number of
    entries of a channel. Rows of weight 0 do not count, whatever is in them."""
    rows = _weights(x, w).to(torch.float32 if x.dtype == torch.bfloat16 else x.dtype)
    rows = rows.view(-1, *[1] * (x.dim() - 1))
    wide, axes = x.to(rows.dtype), [0, *range(2, x.dim())]
    count = (rows.sum() * (x[0, 0].numel())).clamp_min(1e-12)
    counted = torch.where(rows > 0, wide, 0.0)
    mean = (counted * rows).sum(axes) / count
    apart = torch.where(rows > 0, wide - _columns(mean, x), 0.0)
    return (mean, (apart.square() * rows).sum(axes) / count), count


def normalise(x: Tensor, at: Moments, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x − mean) / √(variance + eps) · weight + bias. The mean is subtracted first: in x · scale − mean · scale, digits
    would be lost in channels that hardly vary."""
    mean, variance = at
    scale = (variance.clamp_min(0) + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    out = (x.to(scale.dtype) - _columns(mean, x)) * _columns(scale, x)
    return (out if bias is None else out + _columns(bias, x)).to(x.dtype)


@handles(F.batch_norm)
def _batch_norm(
    run: Pass,
    func: Any,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """BatchNorm layers are in training mode in every pass (see `tasks.networks`), and the pass determines what they do.
    A call without `training` is the module's own, with fixed statistics."""
    if not training:
        return _fixed(x, running_mean, running_var, weight, bias, eps)
    if run.given is not None:
        return normalise(x, next(run.given), weight, bias, eps)
    if run.w is None:
        return _fixed(x, running_mean, running_var, weight, bias, eps)
    if run.seen is None and _is_plain(x, run.w, weight):
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    found, count = moments(x, run.w)
    if run.seen is not None:
        run.seen.append((running_mean, running_var, found, count))
    if run.own:
        return _fixed(x, running_mean, running_var, weight, bias, eps)
    return normalise(x, found, weight, bias, eps)


def _is_plain(x: Tensor, w: Tensor, weight: Tensor | None) -> bool:
    """Whether torch's own kernel computes the same: for one client on a CPU, whose batch has no padding. (A GPU would
    have to wait for the weights.)"""
    alone = x.device.type == "cpu" and not in_cohort(x, w, weight)
    return alone and x.numel() > x.shape[1] and bool((w == 1).all())


def _fixed(
    x: Tensor, mean: Tensor | None, var: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    assert mean is not None  # layers without statistics are refused
    assert var is not None
    if in_cohort(x, mean, weight):
        return normalise(x, (mean, var), weight, bias, eps)
    return F.batch_norm(x, mean, var.clamp_min(0), weight, bias, False, 0.0, eps)
