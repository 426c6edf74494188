"""EP-GAN: Bayesian GANs whose prior is made of factors from all clients (anonymous, under review at ICLR 2022)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from consilience.algorithms.base import algorithm
from consilience.algorithms.gan.players import NOISY, Players, adversarial
from consilience.algorithms.shared.averaging import Server as Averaged
from consilience.algorithms.shared.averaging import continued
from consilience.core import keys
from consilience.core.errors import ConfigError, ConsilienceError, check_word
from consilience.core.gaussian import Gaussian
from consilience.core.ranges import Range, Ranges
from consilience.core.records import Point, Weighted, record
from consilience.data.batch import Batch
from consilience.data.cohort import Cohort, Info
from consilience.inference import sigmoid_moments, sigmoid_site
from consilience.inference.tilted import within_two_deviations
from consilience.optim import Chain
from consilience.server.optimizers import Momentum, ServerOptimizer
from consilience.tasks.adversarial import Adversarial
from consilience.tasks.task import Task

SIGNAL = "signal"  # the part that f and the mixture's weights come from
MIXTURE = keys.word("mixture")
AT_ONCE = 256  # examples in a pass without gradients, at least
Sites = Literal["signal", "samples", "nothing"]
Anchor = Literal["global", "init"]
Fusion = Literal["sites", "printed"]


@record
class Priored:
    """The networks, the product of all clients' sites [J, M], and the centre of p₀ [M], if it does not move."""

    averaged: Averaged
    sites: Gaussian
    anchor: Tensor | None


@record
class Briefing:
    """What clients are told."""

    model: Point
    sites: Gaussian
    anchor: Tensor | None


@record
class Report:
    """What clients answer: how the networks changed, and the factor by which their sites did [K, J, M], if they have
    any."""

    change: Weighted
    site: Gaussian | None


@algorithm
class EPGAN(Players):
    """q(θ) = p₀(θ) Π_k q_k(θ) over the M weights of one generator and one discriminator, p₀ = N(anchor, `scale`²): the
    prior of every sample of them, which it draws together. With `apart` each sample has its own, M are all weights.

    A client's likelihood of θ is Π_i σ(f θ_i), one number f for all weights: the mean over its examples of a small
    network on the discriminator's features. cavity q₋ₖ = q / q_k; tilted q̂ = N(m, s) ≈ Π σ(f θ_i) q₋ₖ, afresh at every
    step, is the prior of all samples of generators and discriminators:

        game + λ Σ_i { (θ_i − m_i)² / 2s_i + ½ ln s_i },    λ = `strength`,

    where f's network learns from the prior and the discriminator's features do not. Once a round, with f over all of
    the client's data, q_k ← q_k^(1−δ) (q̂ / q₋ₖ)^δ, δ = `damping`, 1/K for the K clients of a round when None. Networks
    are averaged as in FedAvg. With `history` it is EP-ProbGAN, else EP-BGAN. `components` J > 1 is a mixture of such
    priors with an f_j and a weight π_j each, −λ Σ_i ln Σ_j π_j N(θ_i; m_ij, s_ij); π is drawn by Gumbel-softmax.

    As f is one number, all that a site can say is: all weights up, or all down. What the prior remembers of networks
    is its `anchor`: where the averaged ones are ("global") or where they began ("init"). `sites="nothing"` is f = 0,
    the ablation: a spring to the anchor. `sites="samples"` takes q̂ from the chain instead: the mean and, in relation to
    each other, the variances of the second half of the round's steps. Such a site says where this client's weights are
    and which of them matter; its precision is 1/`scale`² on average, as p₀'s: a chain's spread has no scale of its own.

    `fusion="printed"` is the paper's: clients send q̂ whole and the server multiplies these, so that what they share is
    counted K times, and variances shrink K-fold every round.
    """

    ranges: ClassVar[Ranges] = {"strength": Range(1e-5, 1e-1), "scale": Range(0.003, 0.3)}
    train: Chain = NOISY
    server: ServerOptimizer = Momentum()
    interpolate: float = 0.0
    history: bool = True
    components: int = 1
    strength: float = 1e-3
    scale: float = 0.03
    sites: Sites = "signal"
    anchor: Anchor = "global"
    fusion: Fusion = "sites"
    hidden: int = 128
    damping: float | None = None
    apart: bool = False
    single = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, words in {"sites": Sites, "anchor": Anchor, "fusion": Fusion}.items():
            check_word(name, getattr(self, name), get_args(words))
        if not (self.strength >= 0 and self.scale > 0 and min(self.components, self.hidden) >= 1):
            raise ConfigError(
                "strength must not be negative, scale positive, components and hidden at least 1, got "
                f"{self.strength}, {self.scale}, {self.components} and {self.hidden}"
            )
        if self.damping is not None and not 0 < self.damping <= 1:
            raise ConfigError(f"damping must lie in (0, 1], got {self.damping}")
        if self.sites != "signal" and (self.components > 1 or self.fusion == "printed"):
            raise ConfigError(f"a mixture and the printed fusion are of signals: sites = {self.sites!r} has neither")

    @property
    def name(self) -> str:
        """As in the paper's tables; what the paper does not have is a method of its own."""
        kind = f"{'Mixture-' if self.components > 1 else ''}EP-{'Prob' if self.history else 'B'}GAN"
        other = {"signal": "", "nothing": ", f = 0", "samples": ", samples"}[self.sites]
        return kind + other + (", printed" if self.fusion == "printed" else "") + (", apart" if self.apart else "")

    def one(self, task: Adversarial, theta: Tensor) -> Tensor:
        """What the prior is about [..., M], of all players' weights [..., P]."""
        return theta[..., : task.played] if self.apart else task.one(theta)

    def all(self, task: Adversarial, value: Tensor) -> Tensor:
        """What is said of M weights, to all that it is said of: [..., M] to [..., P]."""
        return value if self.apart else task.all(value)

    def adapt(self, task: Task, seed: int) -> Task:
        """Append the network of f, then the past."""
        players = adversarial(task, self.name)
        if self.sites == "signal":
            outputs = self.components if self.components == 1 else 2 * self.components
            with keys.seeded(seed, purpose="networks"):
                first, last = nn.Linear(players.features, self.hidden), nn.Linear(self.hidden, outputs)
            players = players.extend(**{SIGNAL: nn.Sequential(first, nn.ReLU(), last)})
        return super().adapt(players, seed)

    def start(self, task: Adversarial, info: Info) -> Priored:
        """The modules' own weights, and sites that say nothing; printed, p₀ itself."""
        anchor = self.one(task, info.initial)
        nothing = anchor.new_zeros(self.components, len(anchor))
        sites = Gaussian(nothing, nothing.clone())
        if self.fusion == "printed":
            sites = self._p0(anchor) * sites
        return Priored(continued(info, self.server), sites, anchor if self.anchor == "init" else None)

    def client(self, task: Adversarial, info: Info, n: Tensor) -> Gaussian | None:
        """A site that says nothing."""
        if self.fusion == "printed" or self.sites == "nothing":
            return None
        nothing = info.initial.new_zeros(len(n), self.components, self.one(task, info.initial).shape[-1])
        return Gaussian(nothing, nothing.clone())

    def message(self, server: Priored, ids: object) -> Briefing:
        """The networks and the prior: every client takes its own site out."""
        return Briefing(server.averaged.model, server.sites, server.anchor)

    def _p0(self, anchor: Tensor) -> Gaussian:
        return Gaussian.of(anchor, torch.full_like(anchor, self.scale**-2))

    def cavity(self, task: Adversarial, message: Briefing, site: Gaussian | None) -> Gaussian:
        """p₀ Π_{j≠k} q_j, [K, J, M]; [J, M] for clients that hold no site."""
        if self.fusion == "printed":
            return message.sites
        p0 = self._p0(self.one(task, message.model.theta) if message.anchor is None else message.anchor)
        return p0 * (message.sites if site is None else message.sites / site)

    def heard(self, task: Adversarial, theta: Tensor, batch: Batch, key: Tensor | None) -> Tensor:
        """One client's f [J], followed by the logits of π if there are several: means over the batch. Only the network
        of f learns from what becomes of them."""
        features, _ = task.features_one(theta[: task.played].detach(), batch.x, key)
        return batch.mean(task.call_one(SIGNAL, task.split(theta)[SIGNAL], features, exact=True))

    def heard_plainly(self, task: Adversarial, theta: Tensor, batch: Batch) -> Tensor:
        """The same without dropout."""
        return self.heard(task, theta, batch, None)

    def energy(self, task: Adversarial, theta: Tensor, batch: Batch, mean: Tensor, var: Tensor) -> Tensor:
        """−ln of the prior of all samples, but for a constant, as f hears a batch; from the cavity's moments [J, M]."""
        heard, weights = self.heard(task, theta, batch, batch.key), theta[: task.played]
        m, s = sigmoid_moments(heard[: self.components].unsqueeze(1), mean, var)
        if self.components == 1:
            return self._single(task, weights, mean[0], m[0], s[0])
        m, s = self.all(task, m), self.all(task, s)
        each = ((weights - m).square() / s + s.log()) / 2
        u = keys.uniform(keys.fold(batch.key, MIXTURE), self.components, each.dtype).clamp_min(1e-7)
        share = (heard[self.components :] - (-u.log()).log()).log_softmax(0)
        return -(share.unsqueeze(1) - each).logsumexp(0).sum()

    def _single(self, task: Adversarial, weights: Tensor, centre: Tensor, m: Tensor, s: Tensor) -> Tensor:
        """½ Σ { (θ − m)² / s + ln s } over all samples, in few passes over their many weights: to m and s, which depend
        on f, sums over samples are enough; to θ the gradient is (θ − m) / s."""
        blocks = [weights.unsqueeze(0)] if self.apart else task.samples(weights)
        sizes = [block.shape[1] for block in blocks]
        total = weights.new_zeros(())
        for block, c, mean, var in zip(
            blocks, *(value.split_with_sizes(sizes) for value in (centre, m, s)), strict=True
        ):
            off, shift, count = block.detach() - c, mean - c, len(block)
            squares = (off * off).sum(0) + shift * (count * shift - 2 * off.sum(0))
            pull = ((off - shift) / var).detach()
            held = (pull * block).sum()
            total = total + (squares / var + count * var.log()).sum() / 2 + (held - held.detach())
        return total

    def loss(self, task: Adversarial, theta: Tensor, batch: Batch, past: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """One client's game, and the prior; the value is the game's."""
        prior = self.strength * self.energy(task, theta, batch, mean, var)
        return self.game(task, theta, batch, past) + (prior - prior.detach())

    def local(
        self, task: Adversarial, message: Briefing, state: Gaussian | None, cohort: Cohort
    ) -> tuple[Report, Gaussian | None]:
        """Cavity, play on tilted after tilted, site."""
        w = message.model.theta
        cavity = self.cavity(task, message, state)
        played, found = (self._by_signal if self.sites == "signal" else self._by_chain)(task, w, cavity, cohort)
        change = Weighted.of(Point(played - w), cohort.n)
        if found is None or state is None:
            return Report(change, None if found is None else cavity * found), None
        report = Report(change, (found / state) ** (self.damping or 1 / cohort.round_size))
        return report, self.follow(state, report)

    def _by_signal(self, task: Adversarial, w: Tensor, cavity: Gaussian, cohort: Cohort) -> tuple[Tensor, Gaussian]:
        """What was played, and tilted / cavity by f over all of the data."""
        shape = (len(cohort), *cavity.eta.shape[-2:])
        mean, var = (value.expand(shape).contiguous() for value in (cavity.mean, cavity.variance))
        played = self.play(self.loss, task, w, cohort, mean, var)
        trained, size = played[:, : task.slice(SIGNAL).stop], max(self.train.batch_size, AT_ONCE)
        heard = cohort.mean(task.vectorize(self.heard_plainly), trained, size)
        return played, sigmoid_site(heard[:, : self.components].unsqueeze(-1), Gaussian.of(mean, 1 / var))

    def _by_chain(
        self, task: Adversarial, w: Tensor, cavity: Gaussian, cohort: Cohort
    ) -> tuple[Tensor, Gaussian | None]:
        """What was played with the cavity for a prior, and tilted / cavity by the chain's samples, if asked for."""
        prior = Gaussian(*(self.all(task, value.squeeze(-2)) for value in (cavity.eta, cavity.lam))) ** self.strength
        drawn = Drawn(self, task, w, self.train.steps(cohort)) if self.sites == "samples" else None
        played = self.play(self.game, task, w, cohort, prior=prior, look=drawn)
        return played, None if drawn is None else drawn.tilted(cavity, self.scale) / cavity

    def follow(self, state: Gaussian | None, update: Report) -> Gaussian | None:
        """The site and its change."""
        return None if state is None or update.site is None else state * update.site

    def swap(self, server: Priored, old: Gaussian | None, new: Gaussian | None) -> Priored:
        """One site in place of another."""
        if old is None or new is None:
            return server
        return Priored(server.averaged, server.sites * (new / old), server.anchor)

    def fuse(self, server: Priored, update: Report) -> Priored:
        """A server step along the mean change, and new sites in place of the old ones; printed, all priors at once."""
        model, memory = self.server.step(server.averaged.model, update.change.mean, server.averaged.memory)
        sites = server.sites
        if update.site is not None:
            sites = update.site if self.fusion == "printed" else server.sites * update.site
        return Priored(Averaged(model, memory), sites, server.anchor)

    def posterior(self, server: Priored) -> Point:
        """The players; the prior is another matter (`prior`)."""
        return server.averaged.model

    def prior(self, task: Adversarial, server: Priored) -> Gaussian:
        """q [J, M]; `task` as `adapt` returned it."""
        return self.cavity(task, self.message(server, None), None)

    def facts(self, server: Priored) -> dict[str, float]:
        """How much all sites say: their mean precision, in units of p₀'s."""
        return {"sites_precision": float(server.sites.lam.mean()) * self.scale**2}

    def audit(self, server: Priored, states: Iterable[Gaussian | None]) -> dict[str, float]:
        """What the server has of the sites is their product."""
        product, any_site = Gaussian.flat(server.sites.eta), False
        for group in states:
            if group is not None:
                product, any_site = product * group.product(), True
        if not any_site:
            return {}
        length = server.sites.norm.sum().clamp_min(1e-3)
        gap = float((server.sites / product).norm.sum() / length)  # earlier rounding stays
        if gap > 1e-3:
            raise ConsilienceError(f"the prior is not the product of the sites: they differ by {gap:.2g} of its length")
        return {"sites_apart": gap}


class Drawn:
    """Moments of the M weights that a prior is about, over all samples and the later half of a round's steps [K, 1]."""

    def __init__(self, method: EPGAN, task: Adversarial, w: Tensor, steps: Tensor) -> None:
        self.method, self.task, self.steps = method, task, steps
        self.centre = method.one(task, w)  # from there, as what is far from 0 would lose the digits of its variance
        self.around = method.all(task, self.centre)
        self.first, self.second = (torch.zeros_like(steps * self.centre) for _ in range(2))

    def __call__(self, taken: Tensor, now: Tensor) -> None:
        """A look at θ [k, P] after a step."""
        k = len(now)
        later = (2 * taken > self.steps[:k]).to(now.dtype)
        off = now[:, : self.task.played] - self.around
        self.first[:k] += later * self.method.one(self.task, off)
        self.second[:k] += later * self.method.one(self.task, off.square())

    def tilted(self, cavity: Gaussian, scale: float) -> Gaussian:
        """The samples' mean; the cavity's precision and 1/scale² more on average, most where they spread least."""
        count = self.steps - (self.steps / 2).floor()
        mean = self.first / count
        var = (self.second / count - mean.square()).clamp_min(0)
        stiff = within_two_deviations(1 / (var + 1e-3 * var.mean(-1, keepdim=True) + 1e-20))
        precision = stiff / stiff.mean(-1, keepdim=True) / scale**2
        return Gaussian.of((mean + self.centre).unsqueeze(1), cavity.lam + precision.unsqueeze(1))
