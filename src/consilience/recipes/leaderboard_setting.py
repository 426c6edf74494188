"""The four federations of the leaderboard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from consilience.data import Federation, heart_disease, load, partition
from consilience.engines import Simulator
from consilience.models import lenet5, logistic, mlp
from consilience.optim import SGD
from consilience.recipes.base import about, seeded
from consilience.studies import Setting
from consilience.tasks import Classification

QUICK = 800  # examples of a quick run


@dataclass(frozen=True)
class Arena:
    """A federation, its network, and what all methods have in common: rounds, clients a round (all when None), local
    optimiser, and the epochs of methods with one exchange. `small` networks allow exact inference. Only convolutions
    are worth a GPU, while its machine's cores compute the other rows."""

    name: str
    title: str
    clients: Callable[[int, bool], Federation]
    network: Callable[[tuple[int, ...], int], nn.Module]
    held_out: float
    rounds: int
    cohort: int | None
    train: SGD
    epochs: int
    small: bool = False
    gpu: bool = False

    def quick(self) -> Arena:
        """The same federation at a size for tests."""
        return replace(self, rounds=2, cohort=None, epochs=2)

    def setting(self, seed: int, quick: bool) -> Setting:
        """Clients, of whose examples a part is held out for testing, and initial weights of a seed."""
        train, test = self.clients(seed, quick).split(self.held_out, seed=seed)
        shape, classes = train.data.x.shape[1:], len(train.data.classes) or 2
        return Setting(Classification(seeded(seed, lambda: self.network(tuple(shape), classes))), train, test)

    @property
    def engine(self) -> Simulator:
        """One process, and plain code on a GPU: rows of the table run side by side, where no timing tells what a round
        takes alone."""
        device, compile = (None, False) if self.gpu else ("cpu", None)
        return Simulator(device=device, chunk=self.cohort or 10, workers=1, threads=1, compile=compile)


def _writers(seed: int, quick: bool) -> Federation:
    everyone = partition.by_group(load("mnist-writers").train, "writer", minimum=50)
    if not quick:
        return everyone
    return Federation.from_silos({everyone.name(k): everyone.client(k) for k in range(QUICK // 100)}, how="by writer")


def _two_labels(seed: int, quick: bool) -> Federation:
    data = load("fashion-mnist").train
    return partition.shards(about(data, QUICK) if quick else data, 10 if quick else 100, shards_per_client=2, seed=seed)


def _dirichlet(seed: int, quick: bool) -> Federation:
    data = load("cifar10").train
    some = about(data, QUICK) if quick else data
    return partition.dirichlet(some, 10, alpha=0.1, seed=seed, minimum=20, balanced=True)


def _hospitals(seed: int, quick: bool) -> Federation:
    return partition.by_group(heart_disease(), "hospital")


def _mlp(inputs: tuple[int, ...], outputs: int) -> nn.Module:
    return mlp(inputs, outputs, hidden=[64])


LOCAL = SGD(lr=0.05, epochs=2, batch_size=20, weight_decay=1e-4)
ARENAS = (
    Arena(
        "writers", "MNIST by writer", _writers, _mlp, held_out=0.25, rounds=50, cohort=50, train=LOCAL, epochs=20
    ),
    Arena(
        "two-labels", "Fashion-MNIST, two labels a client", _two_labels, _mlp, held_out=0.25, rounds=50, cohort=10,
        train=LOCAL, epochs=20,
    ),
    Arena(
        "cifar10", "CIFAR-10, Dirichlet 0.1", _dirichlet, lenet5, held_out=0.2, rounds=30, cohort=None,
        train=replace(LOCAL, batch_size=100, epochs=1), epochs=20, gpu=True,
    ),
    Arena(
        "hospitals", "Four hospitals", _hospitals, logistic, held_out=0.25, rounds=30, cohort=None,
        train=replace(LOCAL, batch_size=16, weight_decay=1e-3), epochs=20, small=True,
    ),
)  # fmt: skip
