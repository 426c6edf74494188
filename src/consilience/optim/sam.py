"""SAM: gradients where the loss is highest nearby (Foret et al., 2021)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from consilience.core.checks import NonNegative
from consilience.core.ranges import Range, Ranges
from consilience.optim.chain import BatchGradient, Now
from consilience.optim.optimizers import SGD


@dataclass(frozen=True)
class SAM(SGD):
    """SGD along ∇loss(θ + ρ ∇loss(θ)/‖∇loss(θ)‖), which avoids sharp minima, for two gradients a step. Priors and
    weight decay are not perturbed. ρ = 0 is SGD.

    `FedAvg(SAM())` is FedSAM (Qu et al., 2022), and `SCAFFOLD(SAM())` FedGAMMA (Dai et al., 2023)."""

    ranges: ClassVar[Ranges] = {"lr": Range(1e-3, 1.0), "rho": Range(0.01, 0.3)}
    rho: NonNegative = 0.05

    def probe(self, gradient: BatchGradient, theta: Tensor, now: Now) -> tuple[Tensor, Tensor]:
        g, loss = gradient(theta)
        if not self.rho:
            return g, loss
        uphill = g if now.running is None else g * (now.running == 0)
        length = uphill.norm(dim=1, keepdim=True).clamp_min(1e-12)
        return gradient(theta + self.rho * uphill / length)[0], loss
