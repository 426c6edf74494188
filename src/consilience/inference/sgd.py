"""SGD: the local loop of nearly every algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from consilience.cohort import Cohort
from consilience.errors import ConfigError
from consilience.gaussian import Gaussian
from consilience.records import rows


@dataclass(frozen=True)
class SGD:
    """v ← ρ v + g, θ ← θ − lr · v, with g = ∇loss + prior's slope + weight_decay · θ; v starts at 0 each round.

    Nearly every local objective in this field is the data loss plus the energy of a Gaussian: `prior`.
    """

    lr: float = 0.05
    momentum: float = 0.0
    epochs: int = 1
    batch: int = 20
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for name, low in {"lr": 0, "epochs": 1, "batch": 1, "weight_decay": 0}.items():
            if not getattr(self, name) >= low:  # nan included
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must lie in [0, 1), got {self.momentum}")

    def __call__(
        self,
        gradient: Callable[..., tuple[Tensor, Tensor]],
        theta: Tensor,
        cohort: Cohort,
        *own: Any,
        prior: Gaussian | None = None,
        shared: tuple[Any, ...] = (),
    ) -> Tensor:
        """The trained parameters [K, P] of every client, from θ [P] or [K, P]. `own` and `prior` are cut to the
        clients that still have a batch."""
        theta = theta.expand(len(cohort), -1).clone()
        velocity = torch.zeros_like(theta) if self.momentum else None
        loss = torch.zeros_like(cohort.n[:, 0])
        for epoch in range(self.epochs):
            loss.zero_()
            for k, batch in cohort.epoch(epoch, self.batch):
                now = theta[:k]
                g, value = gradient(now, batch, *rows(own, slice(k)), shared=shared)
                loss[:k] += value * batch.w.sum(1)
                if prior is not None:
                    g = g + prior.first(k).slope(now)
                if self.weight_decay:
                    g = g + self.weight_decay * now
                if velocity is not None:
                    g = velocity[:k].mul_(self.momentum).add_(g)
                now.sub_(g, alpha=self.lr)
        cohort.note(loss=loss / cohort.n[:, 0])
        return theta
