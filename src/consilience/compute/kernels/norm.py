"""Group norms of a cohort on a GPU, with a ReLU after them or without.

A group of an image is small enough for one multiprocessor to see it twice, once for its moments and once for the
result, and to fetch it from memory once.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from consilience.compute.kernels.launch import joined, launch, power_of_two

# Sizes of blocks are those that were fastest for ResNet-18's layers on an H200.
FORWARD, BACKWARD = 1024, 256  # numbers of a group that a warp looks at together


@triton.jit
def _block(first, P: tl.constexpr, G: tl.constexpr, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """The offsets of BP pixels of a group, from pixel `first` on, and a mask of those that exist."""
    p, c = first + tl.arange(0, BP), tl.arange(0, BC)
    return p[:, None] * (G * C) + c[None, :], (p < P)[:, None] & (c < C)[None, :]


@triton.jit
def _grad(grads, images, at, seen, mean, scaled, bias, RELU: tl.constexpr):
    """(x − mean, gradient before the ReLU) of a block."""
    x = tl.load(images + at, mask=seen, other=0.0).to(tl.float32) - mean
    g = tl.load(grads + at, mask=seen, other=0.0).to(tl.float32)
    if RELU:
        g = tl.where(x * scaled + bias > 0, g, 0.0)
    return x, g


@triton.jit
def _norm(
    images, weight, bias, result, means, scales, B, EPS,
    P: tl.constexpr, G: tl.constexpr, C: tl.constexpr, RELU: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One of G groups, of C channels, of one image of P pixels. Moments are computed by blocks of pixels and merged, so
    that no difference of large sums is taken."""
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    images += image * (P * G * C) + group * C
    result += image * (P * G * C) + group * C
    count, mean, spread = 0.0, 0.0, 0.0
    for first in range(0, P, BP):
        at, seen = _block(first, P, G, C, BP, BC)
        x = tl.load(images + at, mask=seen, other=0.0).to(tl.float32)
        size = (tl.minimum(P - first, BP) * C).to(tl.float32)
        here = tl.sum(x) / size
        apart = tl.where(seen, x - here, 0.0)
        share = size / (count + size)
        spread += tl.sum(apart * apart) + (here - mean) * (here - mean) * count * share
        mean += (here - mean) * share
        count += size
    scale = 1 / tl.sqrt(spread / (P * C) + EPS)
    tl.store(means + image * G + group, mean)
    tl.store(scales + image * G + group, scale)
    c = tl.arange(0, BC)
    channel = image // B * (G * C) + group * C + c
    w = tl.load(weight + channel, mask=c < C, other=0.0).to(tl.float32)[None, :]
    b = tl.load(bias + channel, mask=c < C, other=0.0).to(tl.float32)[None, :]
    for first in range(0, P, BP):
        at, seen = _block(first, P, G, C, BP, BC)
        y = (tl.load(images + at, mask=seen, other=0.0).to(tl.float32) - mean) * scale * w + b
        if RELU:
            y = tl.maximum(y, 0.0)
        tl.store(result + at, y.to(result.dtype.element_ty), mask=seen)


@triton.jit
def _norm_grad(
    grads, images, weight, bias, means, scales, result, by_weight, by_bias, B,
    P: tl.constexpr, G: tl.constexpr, C: tl.constexpr, RELU: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradients of `_norm`, group by group; those in weight and bias are of this image alone."""
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    grads += image * (P * G * C) + group * C
    images += image * (P * G * C) + group * C
    result += image * (P * G * C) + group * C
    mean, scale = tl.load(means + image * G + group), tl.load(scales + image * G + group)
    c = tl.arange(0, BC)
    channel = image // B * (G * C) + group * C + c
    w = tl.load(weight + channel, mask=c < C, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=c < C, other=0.0).to(tl.float32)[None, :]
    scaled = (scale * w)[None, :]
    sum_g, sum_gx = tl.zeros((BP, BC), dtype=tl.float32), tl.zeros((BP, BC), dtype=tl.float32)
    for first in range(0, P, BP):
        at, seen = _block(first, P, G, C, BP, BC)
        x, g = _grad(grads, images, at, seen, mean, scaled, b, RELU)
        sum_g += g
        sum_gx += g * x
    of_bias, of_weight = tl.sum(sum_g, 0), tl.sum(sum_gx, 0) * scale
    tl.store(by_weight + image * (G * C) + group * C + c, of_weight, mask=c < C)
    tl.store(by_bias + image * (G * C) + group * C + c, of_bias, mask=c < C)
    shift, tilt = tl.sum(of_bias * w) / (P * C) * scale, tl.sum(of_weight * w) / (P * C) * scale * scale
    for first in range(0, P, BP):
        at, seen = _block(first, P, G, C, BP, BC)
        x, g = _grad(grads, images, at, seen, mean, scaled, b, RELU)
        tl.store(result + at, (g * scaled - shift - x * tilt).to(result.dtype.element_ty), mask=seen)


def _norm_options(images: Tensor, groups: int, relu: bool, back: bool) -> dict[str, Any]:
    """Backward, sums over pixels stay within few warps where there are many channels: between warps they are slow."""
    pixels, channels = images.shape[2] * images.shape[3], images.shape[4] // groups
    wide = power_of_two(channels, 1, 2 * channels)
    warps = max(power_of_two(256 // wide, 1, 4), power_of_two(wide // 512, 1, 8)) if back else 4
    tall = power_of_two(pixels, 1, max(1, (BACKWARD if back else FORWARD) * warps // wide))
    return {"P": pixels, "G": groups, "C": channels, "RELU": relu, "BP": tall, "BC": wide, "num_warps": warps}


@triton_op("consilience::normalise", mutates_args={})
def normalise(
    images: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Group norm of every client's images [K, B, H, W, C] with its weight and bias [K, C], and max(0, ·) after it if
    `relu`; and the means and reciprocal deviations [K, B, groups] that it used."""
    images = images.contiguous()
    result = torch.empty_like(images)
    means, scales = (images.new_empty(*images.shape[:2], groups, dtype=torch.float32) for _ in range(2))
    launch(
        _norm, (images.shape[0] * images.shape[1], groups), images, weight.contiguous(), bias.contiguous(), result,
        means, scales, images.shape[1], eps, **_norm_options(images, groups, relu, back=False),
    )  # fmt: skip
    return result, means, scales


@triton_op("consilience::normalise_grad", mutates_args={})
def normalise_grad(
    grads: Tensor, images: Tensor, weight: Tensor, bias: Tensor, means: Tensor, scales: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in the images, weight and bias for that in the result."""
    images, groups = images.contiguous(), means.shape[2]
    result = torch.empty_like(images)
    by_weight, by_bias = (images.new_empty(*images.shape[:2], images.shape[4], dtype=torch.float32) for _ in range(2))
    launch(
        _norm_grad, (images.shape[0] * images.shape[1], groups), grads.contiguous(), images, weight.contiguous(),
        bias.contiguous(), means, scales, result, by_weight, by_bias, images.shape[1],
        **_norm_options(images, groups, relu, back=True),
    )  # fmt: skip
    return result, by_weight.sum(1).to(weight.dtype), by_bias.sum(1).to(bias.dtype)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    images, weight, bias, _, _, ctx.relu = inputs
    ctx.save_for_backward(images, weight, bias, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _grads_of_normalise(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return (*normalise_grad(g, *ctx.saved_tensors, ctx.relu), None, None, None)


def _norm_over_clients(
    info: Any, dims: tuple[int | None, ...], images: Tensor, weight: Tensor, bias: Tensor, *how: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    found = normalise(*joined(info.batch_size, dims, images, weight, bias), *how)
    return tuple(t.unflatten(0, (info.batch_size, -1)) for t in found), (0, 0, 0)


normalise.register_autograd(_grads_of_normalise, setup_context=_save_norm)
normalise.register_vmap(_norm_over_clients)
