"""SignalEPGAN: EP-GAN with the likelihood of its paper, one number for all weights."""

from torch import Tensor, nn

from consilience.algorithms.base import algorithm
from consilience.algorithms.gan.ep_players import EPPlayers
from consilience.algorithms.gan.players import adversarial
from consilience.core import Gaussian, keys
from consilience.core.checks import Count
from consilience.data import Batch, Cohort
from consilience.inference import sigmoid_moments, sigmoid_site
from consilience.inference.weight_energy import gaussian_energy, mixture_energy
from consilience.tasks import Adversarial, Task

SIGNAL = "signal"  # the part that computes f and the mixture's weights
GUMBEL = keys.word("mixture")
AT_ONCE = 256  # examples in a pass without gradients, at least


@algorithm
class SignalEPGAN(EPPlayers):
    """EP-GAN as its paper has it: `EPPlayers` whose clients have the likelihood Π_i σ(f θ_i), one number f for all
    weights: the mean over the client's examples of a network with `hidden` units on the discriminator's features.

    The tilted q̂ = N(m, s) ≈ Π σ(f θ_i) q₋ₖ is computed anew at every step and is the prior of all samples:

        game + λ Σ_i { (θ_i − m_i)² / 2s_i + ½ ln s_i }.

    The network of f learns from the prior, the discriminator's features do not. The site is q̂ / q₋ₖ with f over all of
    the client's data. `components` J > 1 is a mixture of such priors with an f_j and a weight π_j each,
    −λ Σ_i ln Σ_j π_j N(θ_i; m_ij, s_ij); π is drawn by Gumbel-softmax.

    As f is one number, a site can only say that all weights should rise, or all should fall. The sites of `EPGAN` say
    more."""

    components: Count = 1
    hidden: Count = 128

    @property
    def name(self) -> str:
        return f"{'Mixture-' if self.components > 1 else ''}{super().name}, f"

    def adapt(self, task: Task, seed: int) -> Task:
        """The task with the network of f, and then the past, as further parts."""
        players = adversarial(task, self.name)
        outputs = self.components if self.components == 1 else 2 * self.components
        with keys.seeded(seed, purpose="networks"):
            first, last = nn.Linear(players.features, self.hidden), nn.Linear(self.hidden, outputs)
        return super().adapt(players.extend(**{SIGNAL: nn.Sequential(first, nn.ReLU(), last)}), seed)

    def signal(self, task: Adversarial, theta: Tensor, batch: Batch, key: Tensor | None = None) -> Tensor:
        """One client's f [J], followed by the logits of π if J > 1: means over the batch, without dropout unless there
        is a key. Only the network of f gets a gradient."""
        features, _ = task.features_one(theta[: task.played].detach(), batch.x, key)
        return batch.mean(task.call_one(SIGNAL, task.split(theta)[SIGNAL], features, exact=True))

    def energy(self, task: Adversarial, theta: Tensor, batch: Batch, mean: Tensor, variance: Tensor) -> Tensor:
        """−ln of the prior of all samples with f of a batch, up to a constant, from the cavity's moments [J, M]."""
        signal, weights = self.signal(task, theta, batch, batch.key), theta[: task.played]
        m, s = sigmoid_moments(signal[: self.components].unsqueeze(1), mean, variance)
        if self.components == 1:
            return gaussian_energy(task.samples(weights), mean[0], m[0], s[0])
        u = keys.uniform(keys.fold(batch.key, GUMBEL), self.components, weights.dtype).clamp_min(1e-7)
        gumbel = -(-u.log()).log()
        return mixture_energy(weights, task.all(m), task.all(s), (signal[self.components :] + gumbel).log_softmax(0))

    def weighted(self, task: Adversarial, theta: Tensor, batch: Batch, mean: Tensor, variance: Tensor) -> Tensor:
        """The `energy` times the prior's strength."""
        return self.strength * self.energy(task, theta, batch, mean, variance)

    def tilt(self, task: Adversarial, w: Tensor, cavity: Gaussian, cohort: Cohort) -> tuple[Tensor, Gaussian]:
        mean, variance = cavity.mean, cavity.variance
        played = self.play(task, w, cohort, mean, variance, energy=self.weighted)
        trained, size = played[:, : task.slice(SIGNAL).stop], max(self.train.batch_size, AT_ONCE)
        signal = cohort.mean(task.vectorize(self.signal), trained, size)
        return played, sigmoid_site(signal[:, : self.components].unsqueeze(-1), Gaussian.of(mean, 1 / variance))
