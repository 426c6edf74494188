"""FedNP's toy problem: three clients hold three pieces of a parabola and fit a cubic together."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from consilience.algorithms import SCAFFOLD, Algorithm, FedAvg, FedNP, FedPA, FedProx, Pooled, algorithm
from consilience.core.checks import Count
from consilience.core.records import rows as of_clients
from consilience.data import Cohort, Dataset, Federation
from consilience.engines import Simulator
from consilience.optim import RMSprop
from consilience.recipes.base import seeded
from consilience.recipes.fednp import WithoutSignal
from consilience.runs import Run, fit
from consilience.tasks.supervised import Regression

PIECES = ((-7.0, -5.0, 30), (-2.0, 2.0, 20), (4.0, 8.0, 50))
TRUTH = torch.tensor([5.0, 2.0, -1.0, 0.0], dtype=torch.float64)
NOISE = 5.0
ROUNDS = 10
ENGINE = Simulator(device="cpu", chunk=len(PIECES), workers=1, threads=1)
FIT, POOLED, FEDAVG, FEDNP, ABLATION = "Pooled fit", "Pooled", "FedAvg", "FedNP", "FedNP, f = 0"


@algorithm
class LossSignal(FedNP):
    """FedNP whose f sees the loss of each example, through a hidden layer of `signal_hidden` units."""

    signal_hidden: Count = 10

    def signal(self, features: int) -> nn.Module:
        last, first = nn.Linear(self.signal_hidden, self.latent), nn.Linear(1, self.signal_hidden)
        return nn.Sequential(first, nn.Tanh(), last)

    def evidence(self, features: Tensor, losses: Tensor) -> Tensor:
        return losses.unsqueeze(1)


@algorithm
class LossWithoutSignal(WithoutSignal, LossSignal):
    """The ablation f = 0 with the same networks."""


@algorithm
class DetachedSignal(LossSignal):
    """No gradient flows through f: its network stays as it began, and z still carries what it says."""

    def f(self, output: Tensor) -> Tensor:
        return super().f(output.detach())


class Cubic(nn.Module):
    """w₀ + w₁x + w₂x² + w₃x³ on unscaled features: x³ reaches 512."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(len(TRUTH), 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(powers(x))
        return out


def powers(x: Tensor) -> Tensor:
    """(1, x, x², x³) of x [..., 1]."""
    return torch.cat([torch.ones_like(x), x, x * x, x * x * x], -1)


def federation(seed: int) -> Federation:
    """Three clients with a piece each."""
    rng, silos = np.random.default_rng(seed), {}
    for number, (low, high, count) in enumerate(PIECES, 1):
        x = torch.from_numpy(rng.uniform(low, high, (count, 1)))
        y = powers(x) @ TRUTH.unsqueeze(1) + NOISE * torch.from_numpy(rng.normal(size=(count, 1)))
        silos[f"client {number}"] = Dataset(x.float(), y.float(), name="pieces of a parabola")
    return Federation.from_silos(silos)


def mse(w: Tensor, data: Dataset) -> float:
    """Of a cubic with coefficients w [4]."""
    return float((powers(data.x.double()) @ w.double() - data.y[:, 0]).square().mean())


def least_squares(data: Dataset) -> Tensor:
    """The coefficients with the least error."""
    found: Tensor = torch.linalg.lstsq(powers(data.x.double()), data.y.double()).solution
    return found[:, 0]


TRAIN = RMSprop(lr=0.01, batch_size=10)


def fednp(kind: type[LossSignal] = LossSignal, strength: float = 0.01, damping: float | None = 1.0) -> LossSignal:
    """FedNP with a scalar z and |f| ≤ 1. f sees half the squared residuals in units of the noise."""
    return kind(TRAIN, latent=1, bound=1.0, strength=strength, damping=damping)


def methods() -> dict[str, Algorithm]:
    """All methods with the paper's steps."""
    return {
        POOLED: Pooled(TRAIN),
        FEDAVG: FedAvg(TRAIN),
        "FedProx": FedProx(TRAIN),
        "SCAFFOLD": SCAFFOLD(TRAIN, variate="gradient"),
        "FedPA": FedPA(TRAIN),
        FEDNP: fednp(),
        ABLATION: fednp(LossWithoutSignal),
    }


def variants(strength: float) -> dict[str, Algorithm]:
    """FedNP and three ablations of it with the same λ."""
    return {
        FEDNP: fednp(strength=strength),
        ABLATION: fednp(LossWithoutSignal, strength),
        "FedNP, f detached": fednp(DetachedSignal, strength),
        "FedNP, δ = 1/K": fednp(strength=strength, damping=None),
    }


def coefficients(run: Run) -> Tensor:
    """The server's coefficients [4]."""
    return run.posterior.mean[run.task.slice(parameter="linear.weight")]


@dataclass(frozen=True)
class Learned:
    """One run, and the coefficients after every round, [rounds, 4]."""

    run: Run
    path: Tensor

    def predicted(self) -> Tensor | None:
        """The mean μ of FedNP's prediction of the coefficients."""
        if not isinstance(self.run.algorithm, FedNP):
            return None
        return self.run.algorithm.weights(self.run.task, cast(Any, self.run.server)).mean


def learn(method: Algorithm, seed: int) -> Learned:
    """Ten rounds on the federation of a seed."""
    path: list[Tensor] = []
    run = fit(
        method, Regression(seeded(seed, Cubic), noise=NOISE), federation(seed), rounds=ROUNDS, seed=seed,
        engine=ENGINE, progress=False, callbacks=[lambda run, _: path.append(coefficients(run).clone())],
    )  # fmt: skip
    return Learned(run, torch.stack(path))


def local(run: Run, seed: int) -> dict[str, Tensor]:
    """The coefficients of each client after one more epoch: the server's, if that client alone took part."""
    clients, algorithm = run.federation, run.algorithm
    ids = clients.sizes.argsort(descending=True)
    cohort = Cohort(clients, ids, round=ROUNDS + 1, round_size=len(ids), seed=seed)
    message = algorithm.message(run.server, ids)
    update, _ = algorithm.local(run.task, message, run.states.gather(ids), cohort)
    where, found = run.task.slice(parameter="linear.weight"), {}
    for row, client in enumerate(ids.tolist()):
        server = algorithm.fuse(run.server, of_clients(update, row))
        found[clients.name(client)] = algorithm.posterior(server).mean[where]
    return dict(sorted(found.items()))
