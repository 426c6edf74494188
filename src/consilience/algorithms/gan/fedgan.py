"""FedGAN: clients train GANs, the server averages both networks (Rasouli et al., 2020)."""

from consilience.algorithms.base import algorithm
from consilience.algorithms.gan.players import Players


@algorithm
class FedGAN(Players):
    """`Players` without a prior or a history. On an `Adversarial` task FedAvg is the same, except for `interpolate`,
    and for `single`: one generator and one discriminator, however many samples the task has."""

    single: bool = False
