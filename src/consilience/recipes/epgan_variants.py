"""Variants of EP-GAN for studies: without a signal, as printed, and with another p₀."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.gan.epgan import EPGAN, EPPlayers, Message, Server, Update
from consilience.algorithms.shared.averaging import change
from consilience.core.gaussian import Gaussian
from consilience.data.cohort import Cohort, Info
from consilience.tasks.adversarial import Adversarial


@algorithm
class Spring(EPPlayers):
    """f = 0, the ablation: no site says anything, and the prior pulls to the averaged networks."""

    @property
    def name(self) -> str:
        return f"{super().name}, f = 0"

    def tilt(self, task: Adversarial, w: Tensor, cavity: Gaussian, cohort: Cohort) -> tuple[Tensor, Gaussian]:
        played = self.play(self.game, task, w, cohort, prior=self.repeated(task, cavity))
        return played, self.flat(task, w, len(cohort))


@algorithm
class InitialAnchor(EPGAN):
    """p₀ stays at the networks' initial weights, as in the paper."""

    def anchor(self, task: Adversarial, w: Tensor) -> Gaussian:
        return super().anchor(task, task.initial())


@algorithm
class Printed(EPGAN):
    """The paper's algorithm: clients send the tilted q̂ whole and the server multiplies these. What clients share is
    counted K times, and variances shrink K-fold every round. The server's `sites` are the whole prior q [J, M]."""

    @property
    def name(self) -> str:
        return f"{super().name}, printed"

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
