"""Launches of Triton kernels inside custom operators, and their rule for `vmap`."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import Any

import triton
from torch import Tensor
from torch.library import wrap_triton


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel so that the compiler sees it; an interpreted kernel (TRITON_INTERPRET=1) is launched as it is."""
    (wrap_triton(kernel) if isinstance(kernel, triton.JITFunction) else kernel)[grid](*args, **options)


def power_of_two(n: int, low: int, high: int) -> int:
    """The power of two at or above n, within bounds."""
    return min(high, max(low, 1 << max(n - 1, 0).bit_length()))


def joined(count: int, dims: tuple[int | None, ...], *tensors: Tensor) -> list[Tensor]:
    """Tensors whose mapped axis, of length `count`, and client axis are one."""
    each = zip(tensors, dims, strict=False)
    return [(t.expand(count, *t.shape) if d is None else t.movedim(d, 0)).flatten(0, 1) for t, d in each]
