"""Pooling, where torch's kernels are slow: the mean of a cohort's images, and the maximum on a CPU."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.compute.passes import Pass, handles, in_cohort


@handles(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
def _mean(run: Pass, func: Any, x: Tensor, output_size: Any) -> Tensor:
    """The mean of a whole image as a mean: torch's kernel is slow in `vmap`, and warns of it."""
    axes = int(func.__name__[-2])  # of "…pool2d"
    sizes = output_size if isinstance(output_size, tuple | list) else (output_size,)
    if all(size == 1 for size in sizes) and in_cohort(x):
        return x.mean(tuple(range(-axes, 0)), keepdim=True)
    pooled: Tensor = func(x, output_size)
    return pooled


@handles(torch.max_pool2d)
def _maximum(run: Pass, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The entries of x at the places of the maxima. A CPU's kernel takes number by number, unless the channels are the
    last axis: then it takes many at once. So the places are found with all channels of all examples as that axis, which
    is 3 times as fast. Among equal numbers both kernels choose the first."""
    if x.device.type != "cpu" or x.dim() != 4 or not x.numel() or in_cohort(x) or not x.is_contiguous():
        pooled: Tensor = func(x, *args, **kwargs)
        return pooled
    last = x.detach().reshape(1, -1, *x.shape[2:]).contiguous(memory_format=torch.channels_last)
    _, places = F.max_pool2d_with_indices(last, *args, **kwargs)
    found = x.flatten(2).gather(2, places.reshape(*x.shape[:2], -1))
    return found.view(*x.shape[:2], *places.shape[2:])
