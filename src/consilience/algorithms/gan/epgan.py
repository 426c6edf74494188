"""EPGAN: EP-GAN with sites from the moments of the clients' chains."""

from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.gan.ep_players import EPPlayers
from consilience.core import TaskError, guards
from consilience.core.checks import NonNegative, Positive, Proportion
from consilience.core.gaussian import Gaussian
from consilience.core.ranges import Range, Ranges
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
        self.first, self.second, self.before = (torch.zeros_like(steps * self.centre) for _ in range(3))
        self.lengths, self.jumps = torch.zeros_like(steps), torch.zeros_like(steps)

    def __call__(self, taken: Tensor, now: Tensor) -> None:
        """Add θ [k, P] of clients that have taken so many steps [k, 1]."""
        k = len(now)
        later = (2 * taken > self.steps[:k]).to(now.dtype)
        again = (2 * (taken - 1) > self.steps[:k]).to(now.dtype)  # there is a step before it
        off = now[:, : self.task.played] - self.around
        mean = self.task.one(off)
        self.first[:k] += later * mean
        self.second[:k] += later * self.task.one(off.square())
        self.lengths[:k] += later * mean.square().sum(-1, keepdim=True)
        self.jumps[:k] += again * (mean - self.before[:k]).square().sum(-1, keepdim=True)
        self.before[:k] = mean

    @property
    def count(self) -> Tensor:
        """The number of steps [K, 1]."""
        return self.steps - (self.steps / 2).floor()

    @property
    def mean(self) -> Tensor:
        """[K, M]."""
        return self.first / self.count + self.centre

    @property
    def variance(self) -> Tensor:
        """[K, M]."""
        return (self.second / self.count - (self.first / self.count).square()).clamp_min(0)

    @property
    def effective(self) -> Tensor:
        """The number of independent draws that the steps are worth, T (1 − r) / (1 + r) ≥ 1, [K, 1]; r is the
        correlation of neighbours over all weights."""
        count = self.count
        variance = (self.lengths / count - (self.first / count).square().sum(-1, keepdim=True)).clamp_min(1e-30)
        r = (1 - self.jumps / (count - 1).clamp_min(1) / 2 / variance).clamp(-0.99, 1)
        return (count * (1 - r) / (1 + r)).clamp_min(1).minimum(count)


@algorithm
class EPGAN(EPPlayers):
    """`EPPlayers` whose sites are the moments of the later half of a client's steps: where its weights are, and which
    of them matter.

    Clients play with the cavity as their prior. With the variances S of a weight, Σ̂ = (1 − ρ) S + ρ mean(S) by layer,
    ρ = `shrinkage`, and Λ_k = τ / Σ̂, clipped at its mean ± 2 standard deviations. τ = T / (T + 1) counts the error
    of the mean of T effective draws. An optimiser's spread has no unit of its own, so Σ̂ is in units in which the mean
    of 1/Σ̂ is p₀'s precision 1/`scale`²; Λ_k stays between `floor` and `cap` times that. Guards count both clippings.

    `layers` are pairs of a name and a factor on λ for the weights whose names begin with it, as the task's `layers`
    has them: (("discriminator", 0.0),) leaves the prior to the generator.

    The paper's sites hold one number for all weights: `SignalEPGAN`."""

    ranges: ClassVar[Ranges] = {"strength": Range(1e-5, 1e-1), "scale": Range(0.003, 0.3)}
    shrinkage: Proportion = 0.1
    floor: NonNegative = 0.1
    cap: Positive = 10.0
    layers: tuple[tuple[str, NonNegative], ...] = ()

    def repeated(self, task: Adversarial, cavity: Gaussian) -> Gaussian:
        prior = super().repeated(task, cavity)
        return prior ** self.factors(task) if self.layers else prior

    def factors(self, task: Adversarial) -> Tensor:
        """The factors of `layers` for all weights [P]."""
        names, found = list(task.layers), dict.fromkeys(task.layers, 1.0)
        for begin, factor in self.layers:
            chosen = [name for name in names if f"{name}.".startswith(f"{begin}.")]
            if not chosen:
                raise TaskError(f"layers: no weights are called {begin!r}; there are {', '.join(names)}")
            found |= dict.fromkeys(chosen, factor)
        each = [torch.full((size,), found[name], dtype=task.dtype) for name, size in task.layers.items()]
        return task.all(torch.cat(each).to(task.device))

    def precision(self, task: Adversarial, moments: ChainMoments) -> Tensor:
        """Λ_k [K, M]."""
        sizes = list(task.layers.values())
        parts = [
            1 / ((1 - self.shrinkage) * s + self.shrinkage * s.mean(-1, keepdim=True) + 1e-20)
            for s in moments.variance.split_with_sizes(sizes, -1)
        ]
        inverse = torch.cat(parts, -1)
        clipped = within_two_deviations(inverse)
        guards.count("site clipped", clipped != inverse)
        effective, unit = moments.effective, self.scale**-2
        lam = effective / (effective + 1) * unit * clipped / clipped.mean(-1, keepdim=True)
        guards.count("site at its floor or cap", (lam < self.floor * unit) | (lam > self.cap * unit))
        return lam.clamp(self.floor * unit, self.cap * unit)

    def tilt(self, task: Adversarial, w: Tensor, cavity: Gaussian, cohort: Cohort) -> tuple[Tensor, Gaussian]:
        moments = ChainMoments(task, w, self.train.steps(cohort))
        played = self.play(task, w, cohort, prior=self.repeated(task, cavity), look=moments)
        tilted = Gaussian.of(moments.mean.unsqueeze(1), cavity.lam + self.precision(task, moments).unsqueeze(1))
        cohort.note(effective=moments.effective.squeeze(-1))
        return played, tilted / cavity
