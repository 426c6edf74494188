"""BayesGAN: samples of generators and discriminators, with a Gaussian prior (Saatchi & Wilson, 2017), federated."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.gan.players import NOISY, AveragedPlayers
from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.core.ranges import Range, Ranges
from consilience.data.cohort import Cohort
from consilience.optim import Chain
from consilience.server.optimizers import Momentum, ServerOptimizer


@algorithm
class BayesGAN(AveragedPlayers):
    """log q(θ) = −n · loss + log N(θ; 0, `variance`), for every sample of the task's generators and discriminators.
    `train` is a sampler. Losses are means over a client's n examples, so the prior enters as its n-th root."""

    ranges: ClassVar[Ranges] = {"variance": Range(0.01, 10.0)}
    train: Chain = NOISY
    server: ServerOptimizer = Momentum()
    interpolate: float = 0.0
    variance: float = 1.0
    single = False
    history = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.variance > 0:
            raise ConfigError(f"variance must be positive, got {self.variance}")

    def prior(self, w: Tensor, cohort: Cohort) -> Gaussian:
        """N(0, variance)^(1/n)."""
        return Gaussian(w.new_zeros(len(cohort), len(w)), 1 / (self.variance * cohort.n))
