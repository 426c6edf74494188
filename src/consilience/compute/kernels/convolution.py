"""Convolutions of a cohort on a GPU: every client has its own weights.

A convolution is a product of matrices: the neighbourhoods of all pixels times the kernel. For K clients it is K
products. Libraries compute it as one convolution with K groups, which spends most of its time on changes of layout, or
as a batched product of neighbourhoods written out, nine times as large as the images for a 3×3 kernel. These kernels
gather neighbourhoods while they multiply, and never store them.

Images are [K, B, height, width, channels], kernels [K, N, h, w, C] for N output channels and C input channels. There
are three functions: `convolve`, its gradient in the images and its gradient in the kernels. All are linear in each of
two arguments, so the gradients of each are the other two. The axis that `vmap` maps over joins the clients.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from consilience.compute.kernels.launch import joined, launch, power_of_two

# Sizes of blocks are those that were fastest for ResNet-18's layers on an H200, with its 132 multiprocessors.
PROCESSORS = 132
PIXELS = 2560  # a share of a sum over pixels, where there are too few sums to keep all multiprocessors busy


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
def _kernels_grad(
    grads, images, result, B, H, W, SHARE, STRIDE,
    TALL: tl.constexpr, WIDE: tl.constexpr,
    C: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    DOWN: tl.constexpr, PAD: tl.constexpr, FLAT: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """A block of BN × BC of the gradient in the kernels [K, N, KH · KW · C]: that in the result [K, B, TALL, WIDE, N]
    times neighbourhoods of images [K, B, H, W, C], over a share of all pixels."""
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
    grads += client * B * TALL * WIDE * N
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
        g = tl.load(grads + p[:, None] * N + n[None, :], mask=(p < stop)[:, None] & (n < N)[None, :], other=0.0)
        a = tl.load(images + (((b * H)[:, None] + y) * W + x) * C + c[None, :], mask=seen, other=0.0)
        total = tl.dot(tl.trans(g), a, total)
    fits = (n < N)[:, None] & (place < KH * KW * C)[None, :]
    tl.store(result + n[:, None] * (KH * KW * C) + place[None, :], total.to(result.dtype.element_ty), mask=fits)


def _chunk(channels: int) -> int:
    """The number of channels of one tap in a block; 0 if taps and channels must be one axis."""
    return next((size for size in (64, 32, 16) if channels % size == 0), 0)


def _gathered(
    images: Tensor, kernels: Tensor, tall: int, wide: int, *, down: int, up: int, pad: int, back: bool
) -> Tensor:
    clients, batch, height, width, channels = images.shape
    made = kernels.shape[4] if back else kernels.shape[1]
    result = images.new_empty(clients, batch, tall, wide, made)
    rows, chunk = batch * -(-tall // up) * -(-wide // up), _chunk(channels)
    if made <= 64:
        bm, bn, warps, stages = 128, power_of_two(made, 16, 64), 4, 3
    elif rows < 256:
        bm, bn, warps, stages = 64, 128, 4, 4
    else:
        bm, bn, warps, stages = (128, 256, 8, 3) if made >= 256 and rows >= 1024 else (128, 128, 4, 3)
    grid = (-(-rows // bm) * up * up * -(-made // bn), clients)
    launch(
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


@triton_op("consilience::convolve_images_grad", mutates_args={})
def convolve_images_grad(grads: Tensor, kernels: Tensor, height: int, width: int, stride: int, padding: int) -> Tensor:
    """The gradient in the images [K, B, height, width, C] for that in the result [K, B, H', W', N]."""
    return _gathered(grads, kernels, height, width, down=1, up=stride, pad=padding, back=True)


@triton_op("consilience::convolve_kernels_grad", mutates_args={})
def convolve_kernels_grad(grads: Tensor, images: Tensor, tall: int, wide: int, stride: int, padding: int) -> Tensor:
    """The gradient in the kernels [K, N, tall, wide, C] for that in the result [K, B, H', W', N]."""
    clients, batch, height, width, channels = images.shape
    out_tall, out_wide, made = grads.shape[2:]
    places, pixels = tall * wide * channels, batch * out_tall * out_wide
    chunk = 128 if channels % 128 == 0 else _chunk(channels)
    bn, bc, bp = power_of_two(made, 16, 128), chunk or power_of_two(places, 16, 32), 64
    columns = -(-made // bn) * -(-places // bc)
    shares = max(1, pixels // PIXELS) if columns * clients < 2 * PROCESSORS else 1
    share = -(-pixels // shares // bp) * bp
    shares = -(-pixels // share)
    form = (clients, made, tall, wide, channels)
    result = images.new_empty(shares, *form, dtype=torch.float32 if shares > 1 else images.dtype)
    launch(
        _kernels_grad, (columns, shares, clients), grads.contiguous(), images.contiguous(), result, batch, height,
        width, share, result[0].numel(), TALL=out_tall, WIDE=out_wide, C=channels, N=made, KH=tall, KW=wide,
        DOWN=stride, PAD=padding, FLAT=not chunk, BN=bn, BC=bc, BP=bp, num_warps=4, num_stages=3,
    )  # fmt: skip
    return result[0] if shares == 1 else result.sum(0).to(images.dtype)


def _grads_of_convolve(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    images, kernels = ctx.saved_tensors
    size, taps, how = images.shape[2:4], kernels.shape[2:4], ctx.how
    return (
        convolve_images_grad(g, kernels, *size, *how) if ctx.needs_input_grad[0] else None,
        convolve_kernels_grad(g, images, *taps, *how) if ctx.needs_input_grad[1] else None,
        None,
        None,
    )


def _grads_of_images_grad(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    grads, kernels = ctx.saved_tensors
    return (
        convolve(g, kernels, *ctx.how) if ctx.needs_input_grad[0] else None,
        convolve_kernels_grad(grads, g, *kernels.shape[2:4], *ctx.how) if ctx.needs_input_grad[1] else None,
        *(None,) * 4,
    )


def _grads_of_kernels_grad(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    grads, images = ctx.saved_tensors
    return (
        convolve(images, g, *ctx.how) if ctx.needs_input_grad[0] else None,
        convolve_images_grad(grads, g, *images.shape[2:4], *ctx.how) if ctx.needs_input_grad[1] else None,
        *(None,) * 4,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.how = inputs[-2:]  # stride and padding


def _over_clients(op: Any) -> Any:
    """The rule of an operator for `vmap`: the new axis joins the clients, or the batch if all use the same kernel."""

    def rule(info: Any, dims: tuple[int | None, ...], a: Tensor, b: Tensor, *how: int) -> tuple[Tensor, int]:
        count = info.batch_size
        if dims[1] is None and dims[0] is not None and op is not convolve_kernels_grad:
            images = a.movedim(dims[0], 1)  # [K, V, B, ...]
            return op(images.flatten(1, 2), b, *how).unflatten(1, (count, images.shape[2])), 1
        return op(*joined(count, dims, a, b), *how).unflatten(0, (count, -1)), 0

    return rule


for _op, _grads in (
    (convolve, _grads_of_convolve),
    (convolve_images_grad, _grads_of_images_grad),
    (convolve_kernels_grad, _grads_of_kernels_grad),
):
    _op.register_autograd(_grads, setup_context=_save)
    _op.register_vmap(_over_clients(_op))
