"""Variants of EP-GAN for studies: without a signal, as printed, and with another p₀."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.gan.ep_players import Message, Server, Update
from consilience.algorithms.gan.epgan import EPGAN, ChainMoments
from consilience.algorithms.gan.signal_epgan import SignalEPGAN
from consilience.algorithms.shared.averaging import change
from consilience.core import Count
from consilience.core.gaussian import Gaussian
from consilience.data.cohort import Cohort, Info
from consilience.tasks import Wasserstein
from consilience.tasks.adversarial import Adversarial


@algorithm
class Spring(EPGAN):
    """The ablation without sites: the prior pulls to the averaged networks."""

    @property
    def name(self) -> str:
        return f"{super().name}, f = 0"

    def tilt(self, task: Adversarial, w: Tensor, cavity: Gaussian, cohort: Cohort) -> tuple[Tensor, Gaussian]:
        played = self.play(task, w, cohort, prior=self.repeated(task, cavity))
        return played, self.flat(task, w, len(cohort))


@algorithm
class MeanOnly(EPGAN):
    """The ablation whose sites say where a client's weights are, and of all the same: Λ_k = τ/`scale`²."""

    @property
    def name(self) -> str:
        return f"{super().name}, mean only"

    def precision(self, task: Adversarial, moments: ChainMoments) -> Tensor:
        share = moments.effective / (moments.effective + 1)
        return share * torch.full_like(moments.mean, self.scale**-2)


@dataclass(frozen=True)
class PixelPenalty(Wasserstein):
    """WGAN-GP as ProbGAN's authors ran it: the penalty is on the sum of `heads` discriminators, and its norm is over
    the channels of each pixel."""

    heads: Count = 4

    def excess(self, gradient: Tensor) -> Tensor:
        norm = ((self.heads * gradient).square().sum(1) + 1e-12).sqrt()
        return (norm - 1).square().flatten(1).mean(1) if norm.dim() > 1 else (norm - 1).square()


@algorithm
class InitialAnchor(SignalEPGAN):
    """p₀ stays at the networks' initial weights, as in the paper."""

    def anchor(self, task: Adversarial, w: Tensor) -> Gaussian:
        return super().anchor(task, task.initial())


@algorithm
class Printed(SignalEPGAN):
    """The paper's algorithm: clients send the tilted q̂ whole and the server multiplies these. What clients share is
    counted K times, and variances shrink K-fold every round. The server's `sites` are the whole prior q [J, M]."""

    @property
    def name(self) -> str:
        return f"{super().name.removesuffix(', f')}, printed"

    def start(self, task: Any, info: Info) -> Server:
        server = super().start(task, info)
        return replace(server, sites=self.anchor(task, info.initial) * server.sites)

    def local(self, task: Adversarial, message: Message, state: Gaussian, cohort: Cohort) -> tuple[Update, Gaussian]:
        w, shape = message.model.theta, (len(cohort), *message.sites.eta.shape)
        q = Gaussian(message.sites.eta.expand(shape), message.sites.lam.expand(shape))
        played, site = self.tilt(task, w, q, cohort)
        return Update(change(played, w, cohort.n), q * site), state

    def follow(self, state: Gaussian, update: Update) -> Gaussian:
        """Clients hold no sites: their states stay flat."""
        return state

    def fuse(self, server: Server, update: Update) -> Server:
        return replace(super().fuse(server, update), sites=update.site)

    def prior(self, task: Adversarial, server: Server) -> Gaussian:
        return server.sites

    def audit(self, server: Server, states: Any) -> dict[str, float]:
        return {}
