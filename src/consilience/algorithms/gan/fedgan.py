"""FedGAN: clients train GANs, the server averages both networks (Rasouli et al., 2020)."""

from __future__ import annotations

from consilience.algorithms.base import algorithm
from consilience.algorithms.gan.players import ADAM, AveragedPlayers
from consilience.optim import Chain
from consilience.server.optimizers import Momentum, ServerOptimizer


@algorithm
class FedGAN(AveragedPlayers):
    """w ← w + Σ p_k (w_k − w) for generator and discriminator, w_k by playing from w: no prior, no past. On an
    `Adversarial` task FedAvg is the same, but for `interpolate`, ρ: w_k ← (1 − ρ) w_k + ρ w after every epoch, and for
    `single`: one generator and one discriminator, however many samples the task has."""

    train: Chain = ADAM
    server: ServerOptimizer = Momentum()
    interpolate: float = 0.0
    single: bool = False
    history = False
