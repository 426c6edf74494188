"""Convolutions and norms of a cohort on a GPU: every client has weights of its own.

A convolution is a product of matrices: the neighbourhoods of all pixels times the kernel. For K clients it is K
products. Libraries have it as one convolution with K groups, where most of the time goes into changing layouts, or as a
batched product of neighbourhoods written out, nine times as large as the images for a 3×3 kernel. Here neighbourhoods
are gathered while they are multiplied, and never exist.

Images are [K, B, height, width, channels], kernels [K, N, h, w, C] for N channels made of C. There are three functions:
`convolve`, its slope in the images and its slope in the kernel. All are linear in each of two arguments, so the slopes
of each are the other two. What `vmap` maps over joins the clients.

`normalise` is a group norm, with a ReLU after it or without. A group of an image is small enough for one multiprocessor
to see it twice, once for its moments and once for the result, and to fetch it from memory once.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

# Sizes of blocks are those that were fastest for ResNet-18's layers on an H200, with its 132 multiprocessors.
PROCESSORS = 132
PIXELS = 2560  # a share of a sum over pixels, where there are too few sums to keep all multiprocessors busy
FORWARD, BACKWARD = 1024, 256  # numbers of a group that a warp looks at together


@triton.jit
def _gather(
    images, kernels, result, B, H, W, TALL, WIDE,
    C: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    DOWN: tl.constexpr, UP: tl.constexpr, PAD: tl.constexpr, BACK: tl.constexpr, FLAT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A block of BM pixels and BN channels of a result [K, B, TALL, WIDE, N] from images [K, B, H, W, C].

    Forward, pixel i of the result sees i · DOWN + t − PAD for every tap t of the kernel. Backward (BACK), pixel h gets
    from those i with i · UP + t − PAD = h: only every UP-th tap fits, the same ones for pixels of the same remainder by
    UP, so that a block has pixels of one remainder only. FLAT, for few channels: taps and channels are one axis.
    """
    block, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks_n: tl.constexpr = (N + BN - 1) // BN
    n = (block % blocks_n) * BN + tl.arange(0, BN)
    block = block // blocks_n
    kind = block % (UP * UP)
    rows, columns = (TALL + UP - 1) // UP, (WIDE + UP - 1) // UP
    m = block // (UP * UP) * BM + tl.arange(0, BM)
    i, j, b = (m // columns) % rows, m % columns, m // (rows * columns)
    above, left = kind // UP, kind % UP
    images += client * B * H * W * C
    kernels += client * (N * KH * KW * C)
    result += client * B * TALL * WIDE * N
    if BACK:
        first_y, first_x = (above + PAD) % UP, (left + PAD) % UP
        taps_y, taps_x = (KH - first_y + UP - 1) // UP, (KW - first_x + UP - 1) // UP
        top, start = i + (above + PAD - first_y) // UP, j + (left + PAD - first_x) // UP
    else:
        first_y, first_x, taps_y, taps_x = 0, 0, KH, KW
        top, start = i * DOWN - PAD, j * DOWN - PAD
    base, real = (b * H)[:, None], (b < B)[:, None]
    top, start = top[:, None], start[:, None]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range((taps_y * taps_x * C + BK - 1) // BK):
        if FLAT:
            place = step * BK + tl.arange(0, BK)
            tap, c = place // C, place % C
        else:
            tap, c = step // (C // BK), step % (C // BK) * BK + tl.arange(0, BK)
        ty, tx = tap // taps_x, tap % taps_x
        if BACK:
            y, x = top - ty, start - tx
        else:
            y, x = top + ty, start + tx
        seen = real & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        ky, kx = first_y + ty * UP, first_x + tx * UP
        if BACK:  # c runs over the channels that the kernel makes, n over those it is made of
            at = ((c * KH + ky) * KW + kx)[:, None] * N + n[None, :]
        else:
            at = n[None, :] * (KH * KW * C) + ((ky * KW + kx) * C + c)[:, None]
        made = (n < N)[None, :]
        if FLAT:
            some = place < taps_y * taps_x * C
            seen, made = seen & some[None, :], made & some[:, None]
        a = tl.load(images + ((base + y) * W + x) * C + c[None, :], mask=seen, other=0.0)
        k = tl.load(kernels + at, mask=made, other=0.0)
        total = tl.dot(a, k, total)
    h, w = i * UP + above, j * UP + left
    where = ((b * TALL + h) * WIDE + w)[:, None] * N + n[None, :]
    fits = ((b < B) & (h < TALL) & (w < WIDE))[:, None] & (n < N)[None, :]
    tl.store(result + where, total.to(result.dtype.element_ty), mask=fits)


@triton.jit
def _meet(
    slopes, images, result, B, H, W, SHARE, STRIDE,
    TALL: tl.constexpr, WIDE: tl.constexpr,
    C: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    DOWN: tl.constexpr, PAD: tl.constexpr, FLAT: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """A block of BN × BC of the kernel's slope [K, N, KH · KW · C]: slopes [K, B, TALL, WIDE, N] meet neighbourhoods of
    images [K, B, H, W, C], over a share of all pixels."""
    block, share, client = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks_n: tl.constexpr = (N + BN - 1) // BN
    n = (block % blocks_n) * BN + tl.arange(0, BN)
    column = block // blocks_n
    place = column * BC + tl.arange(0, BC)
    if FLAT:
        tap, c = place // C, place % C
    else:
        tap, c = column // (C // BC), column % (C // BC) * BC + tl.arange(0, BC)
    ky, kx = tap // KW, tap % KW
    slopes += client * B * TALL * WIDE * N
    images += client * B * H * W * C
    result += share.to(tl.int64) * STRIDE + client * (N * KH * KW * C)
    total = tl.zeros((BN, BC), dtype=tl.float32)
    stop = tl.minimum((share + 1) * SHARE, B * TALL * WIDE)
    for first in range(share * SHARE, stop, BP):
        p = first + tl.arange(0, BP)
        i, j, b = (p // WIDE) % TALL, p % WIDE, p // (TALL * WIDE)
        y, x = (i * DOWN - PAD)[:, None] + ky, (j * DOWN - PAD)[:, None] + kx
        seen = (p < stop)[:, None] & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        if FLAT:
            seen = seen & (place < KH * KW * C)[None, :]
        g = tl.load(slopes + p[:, None] * N + n[None, :], mask=(p < stop)[:, None] & (n < N)[None, :], other=0.0)
        a = tl.load(images + (((b * H)[:, None] + y) * W + x) * C + c[None, :], mask=seen, other=0.0)
        total = tl.dot(tl.trans(g), a, total)
    fits = (n < N)[:, None] & (place < KH * KW * C)[None, :]
    tl.store(result + n[:, None] * (KH * KW * C) + place[None, :], total.to(result.dtype.element_ty), mask=fits)


@triton.jit
def _block(first, P: tl.constexpr, G: tl.constexpr, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """Where BP pixels of a group lie, from pixel `first` on, and which of them there are."""
    p, c = first + tl.arange(0, BP), tl.arange(0, BC)
    return p[:, None] * (G * C) + c[None, :], (p < P)[:, None] & (c < C)[None, :]


@triton.jit
def _slope(slopes, images, at, seen, mean, scaled, bias, RELU: tl.constexpr):
    """(x − mean, slope before the ReLU) of a block."""
    x = tl.load(images + at, mask=seen, other=0.0).to(tl.float32) - mean
    g = tl.load(slopes + at, mask=seen, other=0.0).to(tl.float32)
    if RELU:
        g = tl.where(x * scaled + bias > 0, g, 0.0)
    return x, g


@triton.jit
def _norm(
    images, weight, bias, result, means, scales, B, EPS,
    P: tl.constexpr, G: tl.constexpr, C: tl.constexpr, RELU: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One of G groups, of C channels, of one image of P pixels. Blocks of pixels have moments of their own, which are
    joined: no difference of large sums."""
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
def _norm_back(
    slopes, images, weight, bias, means, scales, result, by_weight, by_bias, B,
    P: tl.constexpr, G: tl.constexpr, C: tl.constexpr, RELU: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The slopes of `_norm`, likewise; those in weight and bias are of this image alone."""
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slopes += image * (P * G * C) + group * C
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
        x, g = _slope(slopes, images, at, seen, mean, scaled, b, RELU)
        sum_g += g
        sum_gx += g * x
    of_bias, of_weight = tl.sum(sum_g, 0), tl.sum(sum_gx, 0) * scale
    tl.store(by_weight + image * (G * C) + group * C + c, of_weight, mask=c < C)
    tl.store(by_bias + image * (G * C) + group * C + c, of_bias, mask=c < C)
    shift, tilt = tl.sum(of_bias * w) / (P * C) * scale, tl.sum(of_weight * w) / (P * C) * scale * scale
    for first in range(0, P, BP):
        at, seen = _block(first, P, G, C, BP, BC)
        x, g = _slope(slopes, images, at, seen, mean, scaled, b, RELU)
        tl.store(result + at, (g * scaled - shift - x * tilt).to(result.dtype.element_ty), mask=seen)


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Through the compiler's door; an interpreted kernel (TRITON_INTERPRET=1) has none."""
    (wrap_triton(kernel) if isinstance(kernel, triton.JITFunction) else kernel)[grid](*args, **options)


def _power(n: int, low: int, high: int) -> int:
    """The power of two at or above n, within bounds."""
    return min(high, max(low, 1 << max(n - 1, 0).bit_length()))


def _chunk(channels: int) -> int:
    """How many channels of one tap are taken at once; 0 if taps and channels must be one axis."""
    return next((size for size in (64, 32, 16) if channels % size == 0), 0)


def _gathered(
    images: Tensor, kernels: Tensor, tall: int, wide: int, *, down: int, up: int, pad: int, back: bool
) -> Tensor:
    clients, batch, height, width, channels = images.shape
    made = kernels.shape[4] if back else kernels.shape[1]
    result = images.new_empty(clients, batch, tall, wide, made)
    rows, chunk = batch * -(-tall // up) * -(-wide // up), _chunk(channels)
    if made <= 64:
        bm, bn, warps, stages = 128, _power(made, 16, 64), 4, 3
    elif rows < 256:
        bm, bn, warps, stages = 64, 128, 4, 4
    else:
        bm, bn, warps, stages = (128, 256, 8, 3) if made >= 256 and rows >= 1024 else (128, 128, 4, 3)
    grid = (-(-rows // bm) * up * up * -(-made // bn), clients)
    _launch(
        _gather, grid, images.contiguous(), kernels.contiguous(), result, batch, height, width, tall, wide,
        C=channels, N=made, KH=kernels.shape[2], KW=kernels.shape[3], DOWN=down, UP=up, PAD=pad, BACK=back,
        FLAT=not chunk, BM=bm, BN=bn, BK=chunk or 32, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return result


@triton_op("consilience::convolve", mutates_args={})
def convolve(images: Tensor, kernels: Tensor, stride: int, padding: int) -> Tensor:
    """Every client's images [K, B, H, W, C] with its kernels [K, N, h, w, C]: [K, B, H', W', N]."""
    tall, wide = (
        (size + 2 * padding - taps) // stride + 1
        for size, taps in zip(images.shape[2:4], kernels.shape[2:4], strict=True)
    )
    return _gathered(images, kernels, tall, wide, down=stride, up=1, pad=padding, back=False)


@triton_op("consilience::convolve_back", mutates_args={})
def convolve_back(slopes: Tensor, kernels: Tensor, height: int, width: int, stride: int, padding: int) -> Tensor:
    """What slopes in the result [K, B, H', W', N] are as slopes in the images [K, B, height, width, C]."""
    return _gathered(slopes, kernels, height, width, down=1, up=stride, pad=padding, back=True)


@triton_op("consilience::convolve_meet", mutates_args={})
def convolve_meet(slopes: Tensor, images: Tensor, tall: int, wide: int, stride: int, padding: int) -> Tensor:
    """What slopes in the result [K, B, H', W', N] are as slopes in kernels [K, N, tall, wide, C]."""
    clients, batch, height, width, channels = images.shape
    out_tall, out_wide, made = slopes.shape[2:]
    places, pixels = tall * wide * channels, batch * out_tall * out_wide
    chunk = 128 if channels % 128 == 0 else _chunk(channels)
    bn, bc, bp = _power(made, 16, 128), chunk or _power(places, 16, 32), 64
    columns = -(-made // bn) * -(-places // bc)
    shares = max(1, pixels // PIXELS) if columns * clients < 2 * PROCESSORS else 1
    share = -(-pixels // shares // bp) * bp
    shares = -(-pixels // share)
    form = (clients, made, tall, wide, channels)
    result = images.new_empty(shares, *form, dtype=torch.float32 if shares > 1 else images.dtype)
    _launch(
        _meet, (columns, shares, clients), slopes.contiguous(), images.contiguous(), result, batch, height, width,
        share, result[0].numel(), TALL=out_tall, WIDE=out_wide, C=channels, N=made, KH=tall, KW=wide, DOWN=stride,
        PAD=padding, FLAT=not chunk, BN=bn, BC=bc, BP=bp, num_warps=4, num_stages=3,
    )  # fmt: skip
    return result[0] if shares == 1 else result.sum(0).to(images.dtype)


def _slopes_of_convolve(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    images, kernels = ctx.saved_tensors
    size, taps, how = images.shape[2:4], kernels.shape[2:4], ctx.how
    return (
        convolve_back(g, kernels, *size, *how) if ctx.needs_input_grad[0] else None,
        convolve_meet(g, images, *taps, *how) if ctx.needs_input_grad[1] else None,
        None,
        None,
    )


def _slopes_of_back(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    slopes, kernels = ctx.saved_tensors
    return (
        convolve(g, kernels, *ctx.how) if ctx.needs_input_grad[0] else None,
        convolve_meet(slopes, g, *kernels.shape[2:4], *ctx.how) if ctx.needs_input_grad[1] else None,
        *(None,) * 4,
    )


def _slopes_of_meet(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    slopes, images = ctx.saved_tensors
    return (
        convolve(images, g, *ctx.how) if ctx.needs_input_grad[0] else None,
        convolve_back(slopes, g, *images.shape[2:4], *ctx.how) if ctx.needs_input_grad[1] else None,
        *(None,) * 4,
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.how = inputs[-2:]  # stride and padding


def _joined(count: int, dims: tuple[int | None, ...], *tensors: Tensor) -> list[Tensor]:
    """What `vmap` maps over, `count` of each, and the clients as one axis."""
    each = zip(tensors, dims, strict=False)
    return [(t.expand(count, *t.shape) if d is None else t.movedim(d, 0)).flatten(0, 1) for t, d in each]


def _over_clients(op: Any) -> Any:
    """`vmap` of an op: what it maps over joins the clients, or the batch where all have the same kernel."""

    def rule(info: Any, dims: tuple[int | None, ...], a: Tensor, b: Tensor, *how: int) -> tuple[Tensor, int]:
        count = info.batch_size
        if dims[1] is None and dims[0] is not None and op is not convolve_meet:
            images = a.movedim(dims[0], 1)  # [K, V, B, ...]
            return op(images.flatten(1, 2), b, *how).unflatten(1, (count, images.shape[2])), 1
        joined = _joined(count, dims, a, b)
        return op(*joined, *how).unflatten(0, (count, -1)), 0

    return rule


for _op, _slopes in (
    (convolve, _slopes_of_convolve),
    (convolve_back, _slopes_of_back),
    (convolve_meet, _slopes_of_meet),
):
    _op.register_autograd(_slopes, setup_context=_remember)
    _op.register_vmap(_over_clients(_op))


def _norm_options(images: Tensor, groups: int, relu: bool, back: bool) -> dict[str, Any]:
    """Backward, sums over pixels stay within few warps where there are many channels: between warps they are slow."""
    pixels, channels = images.shape[2] * images.shape[3], images.shape[4] // groups
    wide = _power(channels, 1, 2 * channels)
    warps = max(_power(256 // wide, 1, 4), _power(wide // 512, 1, 8)) if back else 4
    tall = _power(pixels, 1, max(1, (BACKWARD if back else FORWARD) * warps // wide))
    return {"P": pixels, "G": groups, "C": channels, "RELU": relu, "BP": tall, "BC": wide, "num_warps": warps}


@triton_op("consilience::normalise", mutates_args={})
def normalise(
    images: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Group norm of every client's images [K, B, H, W, C] with its weight and bias [K, C], and max(0, ·) after it if
    `relu`; and the means and reciprocal deviations [K, B, groups] by which it was done."""
    images = images.contiguous()
    result = torch.empty_like(images)
    means, scales = (images.new_empty(*images.shape[:2], groups, dtype=torch.float32) for _ in range(2))
    _launch(
        _norm, (images.shape[0] * images.shape[1], groups), images, weight.contiguous(), bias.contiguous(), result,
        means, scales, images.shape[1], eps, **_norm_options(images, groups, relu, back=False),
    )  # fmt: skip
    return result, means, scales


@triton_op("consilience::normalise_back", mutates_args={})
def normalise_back(
    slopes: Tensor, images: Tensor, weight: Tensor, bias: Tensor, means: Tensor, scales: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What slopes in the result are as slopes in the images, weight and bias."""
    images, groups = images.contiguous(), means.shape[2]
    result = torch.empty_like(images)
    by_weight, by_bias = (images.new_empty(*images.shape[:2], images.shape[4], dtype=torch.float32) for _ in range(2))
    _launch(
        _norm_back, (images.shape[0] * images.shape[1], groups), slopes.contiguous(), images, weight.contiguous(),
        bias.contiguous(), means, scales, result, by_weight, by_bias, images.shape[1],
        **_norm_options(images, groups, relu, back=True),
    )  # fmt: skip
    return result, by_weight.sum(1).to(weight.dtype), by_bias.sum(1).to(bias.dtype)


def _remember_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    images, weight, bias, _, _, ctx.relu = inputs
    ctx.save_for_backward(images, weight, bias, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _slopes_of_norm(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return (*normalise_back(g, *ctx.saved_tensors, ctx.relu), None, None, None)


def _norm_over_clients(
    info: Any, dims: tuple[int | None, ...], images: Tensor, weight: Tensor, bias: Tensor, *how: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    found = normalise(*_joined(info.batch_size, dims, images, weight, bias), *how)
    return tuple(t.unflatten(0, (info.batch_size, -1)) for t in found), (0, 0, 0)


normalise.register_autograd(_slopes_of_norm, setup_context=_remember_norm)
normalise.register_vmap(_norm_over_clients)
