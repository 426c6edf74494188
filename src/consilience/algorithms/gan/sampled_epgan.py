"""SampledEPGAN: EP-GAN with sites from the moments of the clients' chains."""

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.gan.epgan import EPPlayers
from consilience.core.gaussian import Gaussian
from consilience.data.cohort import Cohort
from consilience.inference.tilted import within_two_deviations
from consilience.tasks.adversarial import Adversarial


class ChainMoments:
    """Moments of the M weights of one generator and one discriminator, over all of their samples and the later half of
    a round's steps [K, 1]. Call it after every step of the chain from the weights w [P]."""

    def __init__(self, task: Adversarial, w: Tensor, steps: Tensor) -> None:
        self.task, self.steps = task, steps
        self.centre = task.one(w)  # moments are taken around it: squares far from 0 lose digits of the variance
        self.around = task.all(self.centre)
        self.first, self.second = (torch.zeros_like(steps * self.centre) for _ in range(2))

    def __call__(self, taken: Tensor, now: Tensor) -> None:
        """Add θ [k, P] of clients that have taken so many steps [k, 1]."""
        k = len(now)
        later = (2 * taken > self.steps[:k]).to(now.dtype)
        off = now[:, : self.task.played] - self.around
        self.first[:k] += later * self.task.one(off)
        self.second[:k] += later * self.task.one(off.square())

    def tilted(self, cavity: Gaussian, scale: float) -> Gaussian:
        """The chain's mean, and the cavity's precision [K, 1, M] plus 1/scale² on average, in inverse proportion to
        the variances: a chain's spread has no scale of its own."""
        count = self.steps - (self.steps / 2).floor()
        mean = self.first / count
        variance = (self.second / count - mean.square()).clamp_min(0)
        inverse = within_two_deviations(1 / (variance + 1e-3 * variance.mean(-1, keepdim=True) + 1e-20))
        added = inverse / inverse.mean(-1, keepdim=True) / scale**2
        return Gaussian.of((mean + self.centre).unsqueeze(1), cavity.lam + added.unsqueeze(1))


@algorithm
class SampledEPGAN(EPPlayers):
    """`EPPlayers` who play with the cavity as their prior. The tilted mean is that of the later half of a client's
    steps; the site's precisions are in inverse proportion to the variances there, and 1/`scale`² on average, as p₀'s.

    Such a site says where a client's weights are and which of them matter. It is not in the paper."""

    @property
    def name(self) -> str:
        return f"{super().name}, samples"

    def tilt(self, task: Adversarial, w: Tensor, cavity: Gaussian, cohort: Cohort) -> tuple[Tensor, Gaussian]:
        moments = ChainMoments(task, w, self.train.steps(cohort))
        played = self.play(self.game, task, w, cohort, prior=self.repeated(task, cavity), look=moments)
        return played, moments.tilted(cavity, self.scale) / cavity
