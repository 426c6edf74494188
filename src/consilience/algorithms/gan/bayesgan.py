"""BayesGAN: samples of generators and discriminators, with a Gaussian prior (Saatchi & Wilson, 2017), federated."""

from typing import ClassVar

from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.gan.players import NOISY, Players
from consilience.core import Gaussian, Positive, Range, Ranges
from consilience.data.cohort import Cohort
from consilience.optim import Chain


@algorithm
class BayesGAN(Players):
    """log q(θ) = −n · loss + log N(θ; 0, `variance`), for every sample of the task's generators and discriminators.
    `train` is a sampler."""

    ranges: ClassVar[Ranges] = {"variance": Range(0.01, 10.0)}
    train: Chain = NOISY
    variance: Positive = 1.0

    def weight_prior(self, w: Tensor, cohort: Cohort) -> Gaussian:
        """N(0, variance)^(1/n): the loss is a mean over the client's n examples."""
        return Gaussian(w.new_zeros(len(cohort), len(w)), 1 / (self.variance * cohort.n))
