"""A linear model of hazards in intervals."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ProportionalHazards(nn.Module):
    """wᵀx + a_k for features x [N, D] and intervals k = 1 … T: one weight a feature, and a baseline of T intercepts.
    Weights start at 0, and the baseline at logits of a hazard of about 0.05."""

    def __init__(self, features: int, intervals: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1, bias=False)
        self.baseline = nn.Parameter(torch.full((intervals,), -3.0))
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) + self.baseline
        return found


def proportional_hazards(inputs: Sequence[int], outputs: int) -> nn.Module:
    """One weight a feature, and an intercept for each of `outputs` intervals."""
    return ProportionalHazards(math.prod(inputs), outputs)
