"""A cohort's weighted changes on a GPU in one pass over memory: plain code takes two, at half its speed, because its
kernels for broadcasting do not read several numbers at once."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _change(trained, start, weight, SIZE, BLOCK: tl.constexpr):
    """A block of one client's row of weight · (trained − start)."""
    place, client = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    exists, row = place < SIZE, trained + client * SIZE
    change = tl.load(row + place, mask=exists) - tl.load(start + place, mask=exists)
    tl.store(row + place, change * tl.load(weight + client), mask=exists)


def weighted_change(trained: Tensor, start: Tensor, weight: Tensor) -> Tensor:
    """weight · (trained − start) in place of `trained` [K, P], for a start [P] and weights [K, 1]."""
    clients, size = trained.shape
    _change[-(-size // BLOCK), clients](trained, start.contiguous(), weight.contiguous(), size, BLOCK=BLOCK)
    return trained
