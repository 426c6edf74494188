"""FID: the Fréchet distance of generated and real images by Inception's features."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from consilience.core.errors import ConfigError, DataError
from consilience.data.dataset import Dataset
from consilience.metrics.inception_v3 import inception
from consilience.metrics.judge import counted, evaluating, finite, pixels, spaced

if TYPE_CHECKING:
    from torchmetrics.image.fid import FrechetInceptionDistance


@dataclass(frozen=True, eq=False)
class InceptionDistance:
    """FID (Heusel et al., 2017) by torchmetrics: the Fréchet distance between Inception's features of samples and of at
    most `count` real images, whose moments are computed once for each data set.

    Images are bytes, of one or three channels. Another `network` takes bytes [N, 3, H, W] to features [N, D] and has D
    as `num_features`. A sample that is not finite is infinitely far. FID falls with the number of images, so the name
    has the number of samples: "fid@10000". With the `training` data "fid_train@10000" compares with these, too."""

    count: int = 10_000
    batch_size: int = 100
    network: nn.Module | None = None
    training: Dataset | None = None
    # By id of the examples; holding the examples keeps the id from being used again.
    _known: dict[int, tuple[Tensor, FrechetInceptionDistance]] = field(default_factory=dict, init=False, repr=False)

    @torch.no_grad()
    def __call__(self, samples: Tensor, real: Dataset) -> dict[str, float]:
        scores = {"fid": self._distance(samples, real)}
        if self.training is not None:
            scores["fid_train"] = self._distance(samples, self.training)
        return counted(scores, samples)

    def _distance(self, samples: Tensor, real: Dataset) -> float:
        if min(len(samples), known := min(len(real), self.count)) < 2:
            raise DataError(f"FID needs two images of either kind, got {len(samples)} generated and {known} real")
        if len(finite(samples)) < len(samples):
            return math.inf
        metric = self._metric(real, samples.device)
        metric.reset()
        with evaluating(self._network):
            for part in torch.split(samples, self.batch_size):
                metric.update(_bytes(part, real), real=False)
        # LAPACK may end the process on a matrix that is not finite.
        if not bool((metric.real_features_sum + metric.fake_features_sum).isfinite().all()):
            return math.nan
        return float(metric.compute().clamp(min=0))

    def _metric(self, real: Dataset, device: torch.device) -> FrechetInceptionDistance:
        """torchmetrics' metric, with the real images added."""
        if id(real.x) not in self._known:
            try:
                from torchmetrics.image.fid import FrechetInceptionDistance
            except ImportError as error:
                raise ConfigError("FID needs torchmetrics, which is missing: pip install 'consilience[gan]'") from error
            metric = FrechetInceptionDistance(self._network, reset_real_features=False).to(device)
            with evaluating(self._network):
                for part in torch.split(spaced(real, self.count), self.batch_size):
                    metric.update(_bytes(real.inputs(part), real).to(device), real=True)
            self._known[id(real.x)] = real.x, metric
        return self._known[id(real.x)][1].to(device)

    @cached_property
    def _network(self) -> nn.Module:
        return inception() if self.network is None else self.network


def _bytes(samples: Tensor, real: Dataset) -> Tensor:
    """Images [N, 3, H, W] as bytes; grey becomes three equal channels."""
    images = pixels(samples, real)
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise DataError(f"FID needs images [N, 1 or 3, H, W], got {list(images.shape)} of {real.name}")
    return images.round().byte().expand(-1, 3, -1, -1)
