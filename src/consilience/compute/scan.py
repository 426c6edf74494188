"""Recurrences over time whose steps are elementwise: a few operations a step, forward and backward, also in a cohort.

Plain code records every operation of every step for the gradient, and inside `vmap` each one passes through Python.
These functions record one operation for a whole sequence; `vmap` puts the clients in front of the other axes. On a GPU
a sequence is one kernel.
"""

from typing import Any

import torch
from torch import Tensor


def gated_scan(new: Tensor, forget: Tensor, v: Tensor) -> Tensor:
    """c [..., T, H] with c_t = f_t c_{t−1} + (1 − f_t) x_t, f_t = σ(a_t + v c_{t−1}) and c_0 = 0, for x = `new` and
    a = `forget` [..., T, H] and v [H]. It may be differentiated twice."""
    found: Tensor = _Gated.apply(new, forget, v)  # type: ignore[no-untyped-call]
    return found


def linear_scan(a: Tensor, b: Tensor) -> Tensor:
    """y [..., T, H] with y_t = a_t y_{t−1} + b_t and y_0 = 0."""
    found: Tensor = _Linear.apply(a, b)  # type: ignore[no-untyped-call]
    return found


def _before(y: Tensor) -> Tensor:
    """The values of the step before: 0 at the first one."""
    return torch.cat([torch.zeros_like(y[..., :1, :]), y[..., :-1, :]], -2)


def _in_front(dims: tuple[int | None, ...], *tensors: Tensor) -> list[Tensor]:
    """Tensors with the mapped axis in front; those without one as they are."""
    return [t if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, dims, strict=True)]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        if b.is_cuda:
            from consilience.compute.kernels.scan import linear_scan as kernel

            return kernel(*(x.reshape(-1, *b.shape[-2:]) for x in (a, b))).view(b.shape)  # type: ignore[no-any-return]
        last, out = torch.zeros_like(b[..., 0, :]), []
        for now, plus in zip(a.unbind(-2), b.unbind(-2), strict=True):
            last = torch.addcmul(plus, now, last)
            out.append(last)
        return torch.stack(out, -2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, y = ctx.saved_tensors
        g = _linear_back(a, grad)
        return g * _before(y), g

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], a: Tensor, b: Tensor) -> tuple[Tensor, int]:
        a, b = _in_front(dims, a, b)
        shape = (info.batch_size, *(b if dims[1] is None else b[0]).shape)
        return linear_scan(a.expand(shape), b.expand(shape)), 0


def _linear_back(a: Tensor, grad: Tensor) -> Tensor:
    """g with g_t = grad_t + a_{t+1} g_{t+1}: the same recurrence from the last step to the first."""
    return linear_scan(_before(a.flip(-2)), grad.flip(-2)).flip(-2)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(new: Tensor, forget: Tensor, v: Tensor) -> Tensor:
        if new.is_cuda:
            from consilience.compute.kernels.scan import gated_scan as kernel

            found = kernel(*(x.reshape(-1, *new.shape[-2:]) for x in (new, forget)), v.reshape(-1, v.shape[-1]))
            return found.view(new.shape)  # type: ignore[no-any-return]
        c, out = torch.zeros_like(new[..., 0, :]), []
        for x, a in zip(new.unbind(-2), forget.unbind(-2), strict=True):
            c = torch.lerp(x, c, torch.addcmul(a, v, c).sigmoid_())
            out.append(c)
        return torch.stack(out, -2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        new, forget, v, c = ctx.saved_tensors
        last = _before(c)
        wide = v if v.dim() == 1 else v.unsqueeze(-2)
        f = (forget + wide * last).sigmoid()
        slope = (last - new) * f * (1 - f)  # ∂c_t/∂a_t
        g = _linear_back(f + wide * slope, grad)
        inner = g * slope
        by_v = (inner * last).sum(-2)
        summed = [axis - by_v.dim() for axis in range(by_v.dim() - 1) if v.dim() == 1 or v.shape[axis] == 1]
        by_v = by_v.sum(summed, keepdim=v.dim() > 1) if summed else by_v
        return g * (1 - f), inner, by_v

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int]:
        new, forget, v = _in_front(dims, *tensors)
        shape = (info.batch_size, *(new if dims[0] is None else new[0]).shape)
        new, forget = new.expand(shape), forget.expand(shape)
        if dims[2] is not None:  # [K, H]: for each client its own, the same for its examples and steps
            v = v.view(len(v), *[1] * (new.dim() - 3), *v.shape[1:])
        return gated_scan(new, forget, v), 0
