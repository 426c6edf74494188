"""ProbGAN: the prior of the generators is their last posterior (He et al., 2019), federated."""

from consilience.algorithms.base import algorithm
from consilience.algorithms.gan.players import NOISY, Players
from consilience.optim import Chain


@algorithm
class ProbGAN(Players):
    """q_t(θ_G) ∝ exp(−L_G(θ_G; D_t)) q_{t−1}(θ_G), so log q_t sums the losses against all past discriminators.

    In place of this sum several samples of generators play against the present discriminators and the mean of the past
    ones (`Players`). `train` is a sampler."""

    train: Chain = NOISY
    history = True
