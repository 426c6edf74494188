"""Random functions of torch as functions of a client's key: the same numbers for a client alone and in a cohort."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.compute.compiler import compiling
from consilience.compute.passes import Pass, handles
from consilience.core import keys

_ALPHA = -1.7580993408473766  # the limit of SELU at −∞


def uniform(run: Pass, shape: Sequence[int], like: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) for the next draw of a pass. A number depends on its place along each axis, not on the
    lengths of the axes, so padding of a batch to other lengths leaves it as it is."""
    run.draws += 1
    key = torch.zeros((), dtype=torch.int64, device=like.device) if run.key is None else run.key
    key = keys.mix(key ^ run.draws)
    for length in shape[:-1]:
        key = keys.mix(key.unsqueeze(-1) ^ torch.arange(length, device=like.device))
    if not len(shape):
        return keys.uniform(key, 1, torch.float32)[0]
    if key.is_cuda and not compiling():
        from consilience.compute.kernels.random import uniform as kernel

        drawn: Tensor = kernel(key, shape[-1])
        return drawn
    return keys.uniform(key, shape[-1], torch.float32)


def dropped(run: Pass, x: Tensor, rate: float) -> Tensor:
    """Entries dropped at a rate, and the others scaled up."""
    kept = (uniform(run, x.shape, x) >= rate).to(x.dtype)
    return x * kept / (1 - rate) if rate < 1 else x * kept


@handles(F.dropout, torch.dropout)
def _dropout(run: Pass, func: Any, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return x
    out = dropped(run, x, p)
    return x.copy_(out) if inplace else out


@handles(F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)
def _channels(run: Pass, func: Any, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout of whole channels of [B, C, ...]."""
    if not training or p == 0:
        return x
    factor = dropped(run, x.new_ones(x.shape[:2] + (1,) * (x.dim() - 2)), p)
    return x.mul_(factor) if inplace else x * factor


@handles(F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.feature_alpha_dropout)
def _alpha(run: Pass, func: Any, x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """Dropout that keeps mean and variance after SELU."""
    if not training or p == 0:
        return x
    by_channel = func.__name__.startswith("feature")
    shape = x.shape[:2] + (1,) * (x.dim() - 2) if by_channel else x.shape
    kept = (uniform(run, shape, x) >= p).to(x.dtype)
    scale = ((1 - p) * (1 + p * _ALPHA**2)) ** -0.5 if p < 1 else 0.0
    out = scale * (x * kept + _ALPHA * (1 - kept)) - scale * _ALPHA * p
    return x.copy_(out) if inplace else out


@handles(F.rrelu, torch.rrelu)
def _rrelu(
    run: Pass,
    func: Any,
    x: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    if not training:
        return F.leaky_relu(x, (lower + upper) / 2)
    slope = lower + (upper - lower) * uniform(run, x.shape, x).to(x.dtype)
    out = torch.where(x >= 0, x, x * slope)
    return x.copy_(out) if inplace else out


def _normal(run: Pass, shape: Sequence[int], like: Tensor) -> Tensor:
    tiny = torch.finfo(torch.float32).eps
    return 2**0.5 * torch.erfinv((2 * uniform(run, shape, like) - 1).clamp(tiny - 1, 1 - tiny))


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)


@handles(torch.rand, torch.randn)
def _drawn(run: Pass, func: Any, *size: Any, **options: Any) -> Tensor:
    draw = uniform if func.__name__ == "rand" else _normal
    like = torch.empty(_shape(size or (options.pop("size"),)), **{k: v for k, v in options.items() if k != "generator"})
    return draw(run, like.shape, like).to(like.dtype)


@handles(torch.rand_like, torch.randn_like)
def _drawn_like(run: Pass, func: Any, x: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    return (uniform if func.__name__ == "rand_like" else _normal)(run, x.shape, x).to(dtype or x.dtype)


@handles(torch.bernoulli, torch.Tensor.bernoulli)
def _coin(run: Pass, func: Any, x: Tensor, p: float | None = None, **options: Any) -> Tensor:
    return (uniform(run, x.shape, x) < (x if p is None else p)).to(x.dtype)


@handles(torch.Tensor.bernoulli_)
def _coins(run: Pass, func: Any, x: Tensor, p: float | Tensor = 0.5, **options: Any) -> Tensor:
    return x.copy_((uniform(run, x.shape, x) < p).to(x.dtype))


@handles(torch.Tensor.uniform_)
def _fill_uniform(run: Pass, func: Any, x: Tensor, low: float = 0.0, high: float = 1.0, **options: Any) -> Tensor:
    low, high = options.get("from", low), options.get("to", high)
    return x.copy_(low + (high - low) * uniform(run, x.shape, x))


@handles(torch.Tensor.normal_)
def _fill_normal(run: Pass, func: Any, x: Tensor, mean: float = 0.0, std: float = 1.0, **options: Any) -> Tensor:
    return x.copy_(mean + std * _normal(run, x.shape, x))


@handles(torch.normal)
def _normals(run: Pass, func: Any, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
    tensors = [t for t in (mean, std) if isinstance(t, Tensor)]
    like = sum(tensors[1:], tensors[0]) if tensors else torch.empty(size, dtype=options.get("dtype"))
    drawn: Tensor = mean + std * _normal(run, like.shape, like).to(like.dtype)
    return drawn


@handles(torch.Tensor.exponential_)
def _fill_exponential(run: Pass, func: Any, x: Tensor, lambd: float = 1.0, **options: Any) -> Tensor:
    return x.copy_(-torch.log1p(-uniform(run, x.shape, x)) / lambd)


@handles(F.gumbel_softmax)
def _gumbel(
    run: Pass, func: Any, logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    u = uniform(run, logits.shape, logits).to(logits.dtype)
    noise = -(-torch.log(u.clamp_min(torch.finfo(u.dtype).tiny))).clamp_min(torch.finfo(u.dtype).tiny).log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    places = torch.arange(soft.shape[dim], device=soft.device).view(-1, *[1] * (soft.dim() - 1 - dim % soft.dim()))
    one = (soft.argmax(dim, keepdim=True) == places).to(soft.dtype)
    return one - soft.detach() + soft


@handles(torch.randint)
def _integers(run: Pass, func: Any, low: int, high: Any = None, size: Any = None, **options: Any) -> Tensor:
    if not isinstance(high, int):
        low, high, size = 0, low, high if size is None else size
    like = torch.empty(size, device=options.get("device"))
    drawn: Tensor = low + (uniform(run, like.shape, like) * (high - low)).floor()
    return drawn.to(options.get("dtype") or torch.int64)


@handles(torch.empty, torch.empty_like, torch.Tensor.new_empty)
def _space(run: Pass, func: Any, *args: Any, **options: Any) -> Tensor:
    """Memory that a random function may fill: with a client axis, which the client's numbers need."""
    made: Tensor = func(*args, **options)
    if run.key is None or not made.is_floating_point():
        return made
    return made.zero_() + (run.key * 0).to(made.dtype)
