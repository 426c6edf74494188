"""DP-means (Kulis & Jordan, 2012): units cluster by distance, with no regard to whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from consilience.core.errors import ConfigError
from consilience.core.ranges import Range, Ranges
from consilience.matching.clusters import Clusterer, Clusters, Known, Units

FAINT = 1e-6  # precision of a prior that only speaks where nobody else does


@dataclass(frozen=True)
class DPMeans(Clusterer):
    """k-means that opens a cluster for a unit farther than √penalty from all centres: coordinate descent on
    Σ ‖v − centre‖² + penalty · clusters, at most `limit` of them."""

    ranges: ClassVar[Ranges] = {"penalty": Range(1.0, 100.0)}
    penalty: float = 10.0
    sweeps: int = 20
    limit: int = 700

    def __post_init__(self) -> None:
        if not self.penalty > 0 or self.sweeps < 1 or self.limit < 1:
            raise ConfigError(
                "penalty must be positive, sweeps and limit at least 1, "
                f"got {self.penalty}, {self.sweeps} and {self.limit}"
            )

    @property
    def name(self) -> str:
        """As in the paper."""
        return "DP-means"

    def prior(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Next to nothing."""
        return FAINT * mean, torch.full_like(mean, FAINT)

    def evidence(self, precision: Tensor) -> Tensor:
        """As observed: a cluster's centre is the precision-weighted mean."""
        return precision

    def cluster(self, clients: Sequence[Units], mean: Tensor, known: Known | None, seed: int) -> Clusters:
        """From one cluster of all, until nothing changes."""
        if known is not None:
            raise ConfigError("DP-means knows no streams: it has no posterior to go on from")
        values = torch.cat([units.values for units in clients])
        precision = torch.cat([units.precision.expand(len(units), -1) for units in clients])
        labels = torch.zeros(len(values), dtype=torch.int64)
        centres, trace = values.mean(0, keepdim=True), []
        for _ in range(self.sweeps):
            previous, (labels, objective) = labels, self._assign(values, centres)
            trace.append(objective)
            count = int(labels.max()) + 1
            if torch.equal(labels, previous) and count == len(centres):
                break
            centres = torch.zeros(count, values.shape[1], dtype=values.dtype).index_add_(0, labels, values)
            centres /= torch.bincount(labels).unsqueeze(1)
        eta0, lam0 = self.prior(mean)
        count = int(labels.max()) + 1
        eta = eta0.repeat(count, 1).index_add_(0, labels, values * precision)
        lam = lam0.repeat(count, 1).index_add_(0, labels, precision)
        return Clusters(eta, lam, list(labels.split_with_sizes([len(units) for units in clients])), trace)

    def _assign(self, values: Tensor, centres: Tensor) -> tuple[Tensor, float]:
        """The nearest centre of each unit, those beyond the penalty opening new ones in turn; numbered without gaps,
        and the objective at these centres."""
        nearest, labels = torch.cdist(values, centres).square().min(1)
        for unit in (nearest > self.penalty).nonzero().flatten().tolist():
            if nearest[unit] <= self.penalty or len(centres) >= self.limit:  # one opened in this sweep is near
                continue
            centres = torch.cat([centres, values[unit : unit + 1]])
            distance = (values - values[unit]).square().sum(1)
            # Only units that come later may follow; those before were dealt with.
            closer = distance < nearest
            closer[:unit] = False
            nearest, labels = torch.where(closer, distance, nearest), labels.where(~closer, len(centres) - 1)
        labels = torch.unique(labels, return_inverse=True)[1]
        return labels, float(nearest.sum()) + self.penalty * (int(labels.max()) + 1)
