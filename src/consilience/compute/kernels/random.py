"""Pseudo-random numbers of keys on a GPU in one pass over memory: plain code takes some twenty, of 64-bit integers."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from consilience.compute.kernels.launch import launch

BLOCK = 1024


@triton.jit
def _uniform(key, result, COUNT, SIZE, BLOCK: tl.constexpr):
    """As `keys.uniform` for float32: the upper 24 bits of SplitMix64's finaliser of key ^ position."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = place < SIZE
    x = tl.load(key + place // COUNT, mask=exists, other=0) ^ (place % COUNT)
    x = x.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    tl.store(result + place, (x >> 40).to(tl.float32) * 5.9604644775390625e-08, mask=exists)  # 2⁻²⁴


@triton_op("consilience::uniform", mutates_args={})
def uniform(key: Tensor, count: int) -> Tensor:
    """[..., count] uniform numbers in [0, 1) for keys [...], equal to those of `keys.uniform` in float32."""
    key = key.contiguous()
    result = torch.empty((*key.shape, count), dtype=torch.float32, device=key.device)
    size = result.numel()
    launch(_uniform, (-(-size // BLOCK),), key, result, count, size, BLOCK=BLOCK)
    return result


def _of_many(info: Any, dims: tuple[int | None, None], key: Tensor, count: int) -> tuple[Tensor, int]:
    """The rule for `vmap`: the mapped axis is one more axis of keys. Without one, all have the same numbers."""
    (dim, _) = dims
    mapped = key.expand(info.batch_size, *key.shape) if dim is None else key.movedim(dim, 0)
    return uniform(mapped, count), 0


uniform.register_vmap(_of_many)
