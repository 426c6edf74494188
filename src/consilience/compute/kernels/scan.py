"""Recurrences over time on a GPU: one program has some units of one example, and walks through its steps."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from consilience.compute.kernels.launch import launch, power_of_two


@triton.jit
def _gated(new, forget, v, result, T, H, EACH, DOUBLE: tl.constexpr, BH: tl.constexpr):
    """c_t = f_t c_{t−1} + (1 − f_t) x_t with f_t = σ(a_t + v c_{t−1}); EACH examples in turn have the same v."""
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH + tl.arange(0, BH)
    real: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    weight = tl.load(v + row // EACH * H + h, mask=h < H, other=0.0).to(real)
    c = tl.zeros((BH,), dtype=real)
    at = row * T * H + h
    for _ in range(T):
        x = tl.load(new + at, mask=h < H, other=0.0).to(real)
        a = tl.load(forget + at, mask=h < H, other=0.0).to(real) + weight * c
        c = x + (c - x) / (1 + tl.exp(-a))
        tl.store(result + at, c.to(result.dtype.element_ty), mask=h < H)
        at += H


@triton.jit
def _linear(factor, plus, result, T, H, DOUBLE: tl.constexpr, BH: tl.constexpr):
    """y_t = a_t y_{t−1} + b_t."""
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH + tl.arange(0, BH)
    real: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    y = tl.zeros((BH,), dtype=real)
    at = row * T * H + h
    for _ in range(T):
        a = tl.load(factor + at, mask=h < H, other=0.0).to(real)
        y = a * y + tl.load(plus + at, mask=h < H, other=0.0).to(real)
        tl.store(result + at, y.to(result.dtype.element_ty), mask=h < H)
        at += H


def _options(x: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """(The grid, the constants) for sequences [N, T, H]."""
    wide = power_of_two(x.shape[2], 32, 64)
    options = {"DOUBLE": x.dtype == torch.float64, "BH": wide, "num_warps": wide // 32}
    return (x.shape[0], -(-x.shape[2] // wide)), options


@triton_op("consilience::gated_scan", mutates_args={})
def gated_scan(new: Tensor, forget: Tensor, v: Tensor) -> Tensor:
    """c [N, T, H] for new and forget [N, T, H] and v [K, H], where N is a multiple of K."""
    new, forget, v = new.contiguous(), forget.contiguous(), v.contiguous()
    result = torch.empty_like(new)
    grid, options = _options(new)
    launch(_gated, grid, new, forget, v, result, new.shape[1], new.shape[2], new.shape[0] // v.shape[0], **options)
    return result


@triton_op("consilience::linear_scan", mutates_args={})
def linear_scan(a: Tensor, b: Tensor) -> Tensor:
    """y [N, T, H] for a and b [N, T, H]."""
    a, b = a.contiguous(), b.contiguous()
    result = torch.empty_like(b)
    grid, options = _options(b)
    launch(_linear, grid, a, b, result, b.shape[1], b.shape[2], **options)
    return result
