"""DP-means (Kulis & Jordan, 2012): units cluster by distance, whatever their clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from consilience.core import ConfigError, Count, Positive, Range, Ranges
from consilience.matching.clusters import Clusterer, Clusters, Known, Units

FAINT = 1e-6  # precision of a prior that matters only without observations


@dataclass(frozen=True)
class DPMeans(Clusterer):
    """k-means that opens a cluster for a unit farther than √penalty from all centres: coordinate descent on
    Σ ‖v − centre‖² + penalty · clusters, at most `limit` of them."""

    ranges: ClassVar[Ranges] = {"penalty": Range(1.0, 100.0)}
    penalty: Positive = 10.0
    sweeps: Count = 20
    limit: Count = 700

    @property
    def name(self) -> str:
        return "DP-means"

    def prior(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        return FAINT * mean, torch.full_like(mean, FAINT)

    def evidence(self, precision: Tensor) -> Tensor:
        """The precision itself: a cluster's centre is the precision-weighted mean."""
        return precision

    def cluster(self, clients: Sequence[Units], mean: Tensor, known: Known | None, seed: int) -> Clusters:
        if known is not None:
            raise ConfigError("DP-means has no posterior to continue a stream from")
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
        """(The nearest centre of each unit, numbered without gaps; the objective at these centres). Units beyond the
        penalty open new centres in turn."""
        nearest, labels = torch.cdist(values, centres).square().min(1)
        for unit in (nearest > self.penalty).nonzero().flatten().tolist():
            if nearest[unit] <= self.penalty or len(centres) >= self.limit:  # a new centre is near
                continue
            centres = torch.cat([centres, values[unit : unit + 1]])
            distance = (values - values[unit]).square().sum(1)
            # Only later units may join the new centre.
            closer = distance < nearest
            closer[:unit] = False
            nearest, labels = torch.where(closer, distance, nearest), labels.where(~closer, len(centres) - 1)
        labels = torch.unique(labels, return_inverse=True)[1]
        return labels, float(nearest.sum()) + self.penalty * (int(labels.max()) + 1)
