"""Modes that generated samples find, and density maps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.errors import DataError
from consilience.data.dataset import Dataset
from consilience.metrics.judge import check_alike, check_some, fair_shares, flat


@dataclass(frozen=True, eq=False)
class Modes:
    """The number of clouds around `centres` [C, D] that samples find. A sample belongs to the nearest centre and is
    good within `reach` times its deviation [C]. A mode is found if it has `least` of its fair share N/C in good
    samples.

    A deviation is per coordinate, so a sample of the cloud itself is about deviation·√D away: `reach` is for the plane.
    """

    centres: Tensor
    deviations: Tensor
    reach: float = 3.0
    least: float = 0.2
    count: int = 2000

    def __post_init__(self) -> None:
        if self.centres.dim() != 2 or self.deviations.shape != self.centres.shape[:1] or not len(self.centres):
            got = f"{list(self.centres.shape)} and {list(self.deviations.shape)}"
            raise DataError(f"centres must be [C, D] and deviations [C], got {got}")

    @classmethod
    def of(cls, data: Dataset) -> Modes:
        """A mode for each label: its examples' mean, and their root mean square distance from it per coordinate."""
        if data.labels is None or not len(data):
            raise DataError(f"{data.name} has no classes to use as modes")
        clouds = [flat(data.inputs((data.y == label).nonzero()[:, 0])) for label in torch.unique(data.y)]
        centres = torch.stack([cloud.mean(dim=0) for cloud in clouds])
        spreads = [(cloud - centre).square().mean().sqrt() for cloud, centre in zip(clouds, centres, strict=True)]
        return cls(centres, torch.stack(spreads))

    @torch.no_grad()
    def __call__(self, samples: Tensor, real: Dataset) -> dict[str, float]:
        """{"modes": the number found, "good_share": the share of good samples}."""
        check_some(samples)
        rows = flat(samples)
        check_alike(rows, self.centres.shape[1])
        distances = torch.cdist(rows, self.centres.to(rows), compute_mode="donot_use_mm_for_euclid_dist")
        distance, nearest = distances.min(dim=1)
        good = distance <= self.reach * self.deviations.to(rows)[nearest]
        found = fair_shares(nearest[good], len(self.centres), len(rows)) >= self.least
        return {"modes": float(found.sum()), "good_share": int(good.sum()) / len(rows)}


def density_mse(map: Tensor, truth: Tensor) -> float:
    """Mean squared difference of two maps on one grid, each scaled to [0, 1] there; a constant map becomes 0."""
    if map.shape != truth.shape:
        raise DataError(f"the maps differ in shape: {list(map.shape)} and {list(truth.shape)}")
    return float((_from_0_to_1(map) - _from_0_to_1(truth)).square().mean())


def mixture_density(points: Tensor, centres: Tensor, variances: Tensor | float) -> Tensor:
    """1/C Σ_c N(x; μ_c, v_c I) at `points` [..., D], with `centres` [C, D] and `variances` [C], or one for all."""
    variance = torch.as_tensor(variances, dtype=centres.dtype, device=centres.device).expand(len(centres))
    squares = (points[..., None, :] - centres).square().sum(dim=-1)
    logs = -(squares / variance + centres.shape[1] * (2 * math.pi * variance).log()) / 2
    return logs.logsumexp(dim=-1).exp() / len(centres)


def _from_0_to_1(map: Tensor) -> Tensor:
    map = map.double()
    low, high = map.min(), map.max()
    return (map - low) / (high - low) if bool(high != low) else torch.zeros_like(map)
