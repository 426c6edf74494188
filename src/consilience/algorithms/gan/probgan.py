"""ProbGAN: the prior of the generators is what they were before (He et al., 2019), federated."""

from __future__ import annotations

from consilience.algorithms.base import algorithm
from consilience.algorithms.gan.players import NOISY, AveragedPlayers
from consilience.optim import Chain
from consilience.server.optimizers import Momentum, ServerOptimizer


@algorithm
class ProbGAN(AveragedPlayers):
    """q_t(θ_G) ∝ exp(−L_G(θ_G; D_t)) q_{t−1}(θ_G), so log q_t sums the losses against all discriminators that were.
    Of this sum the generators, several samples of them, see the present discriminators and the mean of the past ones
    as one (`Players`). `train` is a sampler."""

    train: Chain = NOISY
    server: ServerOptimizer = Momentum()
    interpolate: float = 0.0
    single = False
    history = True
