"""Energies of Gaussian priors on many samples of many weights, without the constant of 2π."""

from collections.abc import Sequence

import torch
from torch import Tensor


def gaussian_energy(blocks: Sequence[Tensor], centre: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """½ Σ { (θ − m)² / s + ln s } over samples θ in blocks [samples, M_b], with moments [M], M = Σ M_b.

    The gradient in θ is (θ − m) / s. For the gradients in m and s, sums over samples are enough. Both need few passes
    over the weights. `centre` [M] is a constant near m: squares of differences from it keep their digits."""
    sizes = [block.shape[1] for block in blocks]
    total = mean.new_zeros(())
    for block, c, m, s in zip(blocks, *(v.split_with_sizes(sizes) for v in (centre, mean, variance)), strict=True):
        off, shift, count = block.detach() - c, m - c, len(block)
        squares = (off * off).sum(0) + shift * (count * shift - 2 * off.sum(0))
        gradient = ((off - shift) / s).detach()
        linear = (gradient * block).sum()
        total = total + (squares / s + count * s.log()).sum() / 2 + (linear - linear.detach())
    return total


def mixture_energy(theta: Tensor, mean: Tensor, variance: Tensor, log_weights: Tensor) -> Tensor:
    """−Σ_i ln Σ_j π_j N(θ_i; m_ij, s_ij) for θ [P], moments [J, P] and ln π [J]."""
    each = ((theta - mean).square() / variance + variance.log()) / 2
    return -torch.logsumexp(log_weights.unsqueeze(1) - each, 0).sum()
