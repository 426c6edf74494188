"""Pooling of a cohort: torch's kernel for the mean of an image is slow in `vmap`, and warns of it."""

from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.compute.passes import Pass, handles, in_cohort


@handles(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
def _mean(run: Pass, func: Any, x: Tensor, output_size: Any) -> Tensor:
    axes = int(func.__name__[-2])  # of "…pool2d"
    sizes = output_size if isinstance(output_size, tuple | list) else (output_size,)
    if all(size == 1 for size in sizes) and in_cohort(x):
        return x.mean(tuple(range(-axes, 0)), keepdim=True)
    pooled: Tensor = func(x, output_size)
    return pooled
