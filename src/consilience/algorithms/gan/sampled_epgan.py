"""SampledEPGAN: EP-GAN with sites from the moments of the clients' chains."""

from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.gan.epgan import EPPlayers
from consilience.core.gaussian import Gaussian
from consilience.data.cohort import Cohort
from consilience.inference.chain_moments import ChainMoments
from consilience.tasks.adversarial import Adversarial


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
