"""FedLA: online Laplace approximation, means weighted by Fisher information (Liu et al., 2021)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.core import guards
from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.core.ranges import Range, Ranges
from consilience.core.records import Weighted, record
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGD, Chain
from consilience.tasks.task import Task


@record
class Mode:
    """Weights w and their precision Λ, a mean over examples; [P] both."""

    theta: Tensor
    precision: Tensor


@record
class Online:
    """What has been learned, over how many rounds with old ones fading [1], and how many examples there are [1]."""

    mode: Mode
    rounds: Tensor
    examples: Tensor


@record
class Evidence:
    """What clients have found: F_k and Λ_k (w_k − w), [K, P] both."""

    fisher: Tensor
    pull: Tensor


@algorithm
class FedLA(Algorithm):
    """Clients minimise loss + λ/2 (θ − w)ᵀΛ(θ − w) and believe N(w_k, Λ_k⁻¹) with Λ_k = λΛ + F_k: the precision of the
    prior that they had, and the diagonal Fisher information of an example at w_k (plus weight decay, which curves the
    loss as well). The server multiplies these beliefs: Λ ← Σ p_k Λ_k, w ← Λ⁻¹ Σ p_k Λ_k w_k. It begins with Λ = 0.

    `strength` is λ; old Fisher information fades as λ, λ², …, so at 1 it never does, and the leash gets shorter every
    round. Clients' precisions have `prior` added when they weight means: where Λ is far below it, that is the plain
    mean. λ = 0 with the same F everywhere is FedAvg. `batch` is how many examples' gradients are in memory at once.

    Losses are means over examples and so is Λ. The posterior is that of all N examples, each counted once: its
    precision is κ N (Λ / (1 + λ + λ² + …) + prior), with a term for every round so far. κ = 1 is the likelihood as it
    is; networks with far more weights than data want it colder, as in `Laplace`.
    """

    ranges: ClassVar[Ranges] = {"strength": Range(0.01, 1.0)}
    train: Chain = SGD()
    strength: float = 0.5
    prior: float = 1e-4
    kappa: float = 500.0
    batch_size: int = 20

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= 1:
            raise ConfigError(f"strength must lie in [0, 1], or precision grows without bound; got {self.strength}")
        if not (self.prior > 0 and self.kappa > 0):
            raise ConfigError(f"prior and kappa must be positive, got {self.prior} and {self.kappa}")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {self.batch_size}")

    def start(self, task: Task, info: Info) -> Online:
        """The module's own weights, and no information."""
        mode = Mode(info.initial, torch.zeros_like(info.initial))
        return Online(mode, info.initial.new_zeros(1), info.examples.to(info.initial).view(1))

    def message(self, server: Online, ids: object) -> Mode:
        """w and Λ."""
        return server.mode

    def local(self, task: Task, message: Mode, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        """Train from w with the leash; send n_k F_k and n_k Λ_k (w_k − w)."""
        w, held = message.theta, self.strength * message.precision
        trained = self.train(task, w, cohort, prior=Gaussian.of(w, held))
        fisher = cohort.mean(task.fisher, trained, self.batch_size, tag="fisher") + self.train.weight_decay
        return Weighted.of(Evidence(fisher, (held + fisher + self.prior) * (trained - w)), cohort.n), None

    def fuse(self, server: Online, update: Weighted) -> Online:
        """The product of what the clients believe."""
        found, mode = update.mean, server.mode
        precision = self.strength * mode.precision + found.fisher
        guards.count("mean without precision", precision < self.prior)
        theta = mode.theta + found.pull / (precision + self.prior)
        return Online(Mode(theta, precision), self.strength * server.rounds + 1, server.examples)

    def posterior(self, server: Online) -> Gaussian:
        """N(w, (κ N (Λ / rounds + prior))⁻¹)."""
        once = server.mode.precision / server.rounds.clamp_min(1)
        return Gaussian.of(server.mode.theta, self.kappa * server.examples * (once + self.prior))
