"""Label skew: FedNP, its ablation and the methods that its paper compares it with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from consilience.algorithms import (
    MOON,
    SCAFFOLD,
    FedAvg,
    FedBE,
    FedDC,
    FedDyn,
    FedLA,
    FedNova,
    FedNP,
    FedNPClasses,
    FedPA,
    FedProx,
    LocalOnly,
    Pooled,
)
from consilience.algorithms.base import algorithm
from consilience.algorithms.switch import Method
from consilience.data import Dataset, Federation, load, partition
from consilience.engines.simulator import Simulator
from consilience.models import lenet5, mlp
from consilience.optim import SGD
from consilience.recipes.base import Options, Recipe, about, compared, seeded
from consilience.studies import Comparison, Setting
from consilience.tasks.supervised import Classification

TEXT = (
    "All methods start from the same weights and do the same local work with plain SGD, which SCAFFOLD and FedDC "
    "require. “FedNP, f = 0” is the ablation: z carries no information, and only the term that ties the last layer to "
    "a prediction remains. “seconds” are those of training, over all rounds."
)
CLASSES = "FedNP, classes"
ONE_CORE = Simulator(device="cpu", chunk=10, workers=1, threads=1)
LATENT = (CLASSES, "FedAvg", "FedNP", "FedNP, f = 0", "FedDC")  # differences are to the first


@algorithm
class PooledSignal(FedNP):
    """FedNP with one f for all coordinates of z, the mean of its network's outputs, as in the paper. Then all z_i stay
    equal, and the dimension of z is redundant."""

    def f(self, output: Tensor) -> Tensor:
        return super().f(output.mean(-1, keepdim=True).expand_as(output))


@algorithm
class WithoutSignal(FedNP):
    """FedNP with f = 0, the ablation: sites carry no information and q(z) stays N(0, 1). The KL term of W remains."""

    @property
    def name(self) -> str:
        return "FedNP, f = 0"

    def f(self, output: Tensor) -> Tensor:
        return torch.zeros_like(output)


def everyone(train: SGD, as_printed: bool = False) -> dict[str, Method]:
    """All methods by name; `as_printed` takes FedNP as in its paper, with one f and undamped sites."""
    return {
        "FedAvg": FedAvg(train),
        "FedProx": FedProx(train, mu=0.01),
        "FedNova": FedNova(train),
        "SCAFFOLD": SCAFFOLD(train),
        "MOON": MOON(train, mu=1.0),
        "FedDyn": FedDyn(train),
        "FedDC": FedDC(train),
        "FedPA": FedPA(train, burn_in=train.epochs // 2),
        "FedLA": FedLA(train),
        "FedBE": FedBE(train),
        "FedNP": PooledSignal(train, damping=1.0) if as_printed else FedNP(train),
        "FedNP, f = 0": WithoutSignal(train),
        "LocalOnly": LocalOnly(train),
        "Pooled": Pooled(train),
    }


@dataclass(frozen=True)
class Benchmark:
    """Data, their partition, and a budget. `tune` is the number of trials for each method, and `more` are methods
    beside `everyone`."""

    name: str
    title: str
    text: str
    setting: Callable[[int, bool], Setting]
    train: SGD
    rounds: int
    names: tuple[str, ...]
    as_printed: bool = False
    more: Callable[[SGD], Mapping[str, Method]] = lambda train: {}
    few: tuple[str, ...] = ()
    """The methods of the small size; all if it is empty."""
    tune: int | None = None
    target: float | None = None
    every: int = 5
    engine: Simulator = Simulator()
    paper: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def methods(self) -> dict[str, Method]:
        known = everyone(self.train, self.as_printed) | dict(self.more(self.train))
        return {name: known[name] for name in self.names}

    def quick(self) -> Benchmark:
        """The small size: a few rounds of little work."""
        train, tiny = replace(self.train, epochs=2, batch_size=32), Simulator(chunk=5, workers=1, threads=1)
        names, tune = self.few or self.names, self.tune and 1
        return replace(self, train=train, rounds=2, names=names, tune=tune, every=2, engine=tiny, paper={})

    def compare(self, options: Options) -> Comparison:
        mine = self.quick() if options.quick else self
        return compared(
            self.name, self.title, f"{self.text} {TEXT}", options, mine.methods(),
            lambda seed: self.setting(seed, options.quick), tune=mine.tune, target=mine.target, paper=mine.paper,
            rounds=mine.rounds, evaluate_every=mine.every, checkpoint_every=20, engine=mine.engine,
        )  # fmt: skip

    def recipe(self, seeds: int) -> Recipe:
        return Recipe(self.name, self.title, self.compare, seeds=seeds)


Share = Callable[[Dataset, int], Federation]


def fmnist(share: Share, seed: int, quick: bool) -> Setting:
    """6,000 images of Fashion-MNIST at ten clients; an MLP, for two cores."""
    data = load("fashion-mnist")
    train, test = data.train[:: 100 if quick else 10], data.test[:: 50 if quick else 1]
    module = seeded(seed, lambda: mlp(train.x.shape[1:], 10, (20,) if quick else (100,)))
    return Setting(Classification(module), share(train, seed), test)


def with_classes(train: SGD) -> dict[str, Method]:
    """The method whose latent has the classes' features."""
    return {CLASSES: FedNPClasses(train)}


def label_skew(name: str, who: str, share: Share) -> Benchmark:
    """A study for two CPU cores."""
    return fashion(name, who, share, tuple(everyone(SGD())), rounds=50, tune=5, engine=Simulator())


def latent(name: str, who: str, share: Share) -> Benchmark:
    """A study of the latent of classes, for one CPU core."""
    return fashion(name, who, share, LATENT, rounds=15, tune=3, engine=ONE_CORE)


def fashion(
    name: str, who: str, share: Share, names: tuple[str, ...], *, rounds: int, tune: int, engine: Simulator
) -> Benchmark:
    """A study of Fashion-MNIST."""
    return Benchmark(
        name=name, title=f"Fashion-MNIST, {who}",
        text=f"6,000 images at ten clients, {who}; an MLP with 100 hidden units, {rounds} rounds of two epochs. Every "
        f"method had {tune} trials on a validation part of the first seed's training data.",
        setting=lambda seed, quick: fmnist(share, seed, quick), train=SGD(lr=0.05, epochs=2, batch_size=20),
        rounds=rounds, names=names, more=with_classes, tune=tune, target=0.75, engine=engine,
    )  # fmt: skip


def small_cifar(seed: int, quick: bool) -> Setting:
    """2,000 images of CIFAR-10 at five clients, two shards of sorted labels each; LeNet-5, for two cores."""
    data = load("cifar10")
    train, test = about(data.train, 200 if quick else 2000), about(data.test, 200 if quick else 2000)
    module = seeded(seed, lambda: lenet5(train.x.shape[1:], 10))
    return Setting(Classification(module), partition.shards(train, 5, shards_per_client=2, seed=seed), test)


def dirichlet(data: Dataset, seed: int) -> Federation:
    """Labels by Dirichlet 0.1."""
    return partition.dirichlet(data, 10, alpha=0.1, seed=seed, minimum=20)


def one_or_two(data: Dataset, seed: int) -> Federation:
    """Two shards of sorted labels for each client."""
    return partition.shards(data, 10, shards_per_client=2, seed=seed)


SKEWED = label_skew("fednp-fmnist", "labels by Dirichlet 0.1", dirichlet)
SHARDS = label_skew("fednp-fmnist-labels", "one or two labels a client", one_or_two)
LATENT_SHARDS = latent("fednp-latent", "one or two labels a client", one_or_two)
LATENT_SKEWED = latent("fednp-latent-dirichlet", "labels by Dirichlet 0.1", dirichlet)
LATENT_CIFAR = Benchmark(
    name="fednp-latent-cifar10", title="A small part of CIFAR-10, two shards of labels a client",
    text="2,000 images at five clients with two shards of sorted labels each, 2,000 test images; LeNet-5, 20 rounds "
    "of two epochs. Every method had two trials on a validation part of the first seed's training data.",
    setting=small_cifar, train=SGD(lr=0.05, epochs=2, batch_size=20), rounds=20, names=LATENT, more=with_classes,
    tune=2, engine=ONE_CORE,
)  # fmt: skip
RECIPES = (
    SKEWED.recipe(3), SHARDS.recipe(3), LATENT_SHARDS.recipe(5), LATENT_SKEWED.recipe(5), LATENT_CIFAR.recipe(3),
)  # fmt: skip
