"""LaplaceHead: a linear layer whose weights are Gaussian, as a module that predicts with their mean and variance."""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class LaplaceHead(nn.Module):
    """Logits m_c / √(1 + π s_c² / 8) of features x [..., d]: those of a linear layer with Gaussian weights have means
    m_c and variances s_c², and are shrunk so that their softmax or sigmoid is about its expectation (MacKay, 1992).
    With φ = (x, 1), s_c² = Σ_i variance[i, c] (project φ)_i²."""

    def __init__(self, features: int, classes: int, directions: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(classes, features))
        self.bias = nn.Parameter(torch.zeros(classes))
        self.project = nn.Parameter(torch.zeros(directions, features + 1))
        self.variance = nn.Parameter(torch.zeros(directions, classes))

    def forward(self, x: Tensor) -> Tensor:
        """The shrunk logits [..., C]."""
        along = F.linear(x, self.project[:, :-1], self.project[:, -1])
        variance = along.square() @ self.variance
        return F.linear(x, self.weight, self.bias) * torch.rsqrt(1 + math.pi / 8 * variance)
