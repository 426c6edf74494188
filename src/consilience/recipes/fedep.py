"""FedEP's benchmarks: all methods continue the same FedAvg warm start with the same local work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from consilience.algorithms import Algorithm, FedAvg, FedEP, FedPA, FedProx, FedSEP, Switch
from consilience.algorithms.switch import Method
from consilience.core import Gaussian
from consilience.data import Compose, Crop, Dataset, Flip, Standardize, load, partition
from consilience.engines.simulator import Simulator
from consilience.evaluation import evaluate, temper
from consilience.inference import MCMC, NGVI, Identity, Laplace, Tilted
from consilience.metrics import best, rounds_to
from consilience.models import cnn, mlp, resnet18_v2
from consilience.optim import SGD
from consilience.recipes.base import Options, Recipe, about, compared, published, seeded
from consilience.runs.run import Run
from consilience.server.optimizers import Momentum, ServerOptimizer
from consilience.studies import Comparison, Setting
from consilience.tasks.supervised import Classification

TEXT = (
    "All methods continue the same rounds of FedAvg, with the same local optimiser and the same clients in each round. "
    "FedEP keeps a factor at each client, FedSEP keeps none. The letter names how a client finds its precision: I "
    "scaled identity, M variance of the iterates, L Laplace, V variational. “Marginal” averages the predictions of ten "
    "draws from the posterior; a method without a posterior has no such row."
)


@dataclass(frozen=True)
class Benchmark:
    """One setting: the data, the budget, and the scales of the Gaussians.

    With `tempered`, a temperature of the posterior is fitted on every second test example and scored on the others.
    `mixed` shuffles the local epochs of FedAvg and FedProx together. Methods that take a sample an epoch cannot do so.
    c = κ (s₀ + weight decay) is the precision that an example adds. `clips` limit a client's natural parameters,
    for FedEP only, and `stateful_laplace_epochs` are its Laplace epochs, if they differ; with `augmented` they see
    augmented inputs. `window` is the length of the running mean in "best", for each of `metrics`; `target` is a value
    of the first."""

    name: str
    title: str
    text: str
    setting: Callable[[int, bool], Setting]
    train: SGD
    server: ServerOptimizer
    rounds: int
    switch: int
    cohort: int
    kappa: float
    s0: float
    names: str = "FedAvg FedProx FedPA FedEP(I) FedEP(M) FedEP(L) FedEP(V) FedSEP(I) FedSEP(V)"
    mixed: bool = False
    clips: Mapping[str, float] = field(default_factory=dict)
    shrink: float = 1e-4
    laplace_epochs: int = 5
    stateful_laplace_epochs: int | None = None
    laplace_batch: int = 10
    augmented: bool = False
    ngvi_epochs: int = 5
    ngvi_samples: int = 5
    mu: float = 0.01
    metrics: tuple[str, ...] = ("accuracy",)
    target: float | None = None
    tempered: bool = False
    window: int = 100
    every: int = 10
    engine: Simulator = Simulator()
    paper: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def infer(self, letter: str) -> Tilted:
        """One of the paper's four kinds of inference."""
        c, curved = self.kappa * (self.s0 + self.train.weight_decay), (self.train, self.kappa, self.s0)
        kinds: dict[str, Callable[[], Tilted]] = {
            "I": lambda: Identity(self.train, c),
            "M": lambda: MCMC(self.train, c, self.shrink),
            "L": lambda: Laplace(*curved, self.laplace_epochs, self.laplace_batch, augmented=self.augmented),
            "V": lambda: NGVI(*curved, self.ngvi_epochs, self.train.batch_size, self.ngvi_samples),
        }
        return kinds[letter]()

    def methods(self) -> dict[str, Method]:
        """Methods by name, each after the same rounds of FedAvg."""
        first = self.method("FedAvg")
        return {name: Switch(first, self.method(name), self.switch) for name in self.names.split()}

    def method(self, name: str) -> Algorithm:
        kind, _, letter = name.rstrip(")").partition("(")
        averaging = replace(self.train, mixed=self.mixed)
        match kind:
            case "FedAvg":
                return FedAvg(averaging, server=self.server)
            case "FedProx":
                return FedProx(averaging, mu=self.mu, server=self.server)
            case "FedPA":
                return FedPA(self.train, server=self.server, burn_in=self.train.epochs // 2)
            case "FedEP":
                mine = replace(self, laplace_epochs=self.stateful_laplace_epochs or self.laplace_epochs)
                return FedEP(mine.infer(letter), server=self.server, clip=self.clips.get(letter))
            case _:
                return FedSEP(self.infer(letter), server=self.server)

    def quick(self) -> Benchmark:
        """The small size: a few rounds of little work."""
        return replace(
            self, train=replace(self.train, epochs=2), rounds=3, switch=1, cohort=3, laplace_epochs=1,
            stateful_laplace_epochs=None, ngvi_epochs=1, ngvi_samples=2, window=3, every=3,
            engine=Simulator(chunk=3, workers=1, threads=1),
        )  # fmt: skip

    def measure(self, run: Run, setting: Setting) -> dict[str, float]:
        """The best running mean of a learning curve, the rounds to a target, and the scores of a fitted temperature."""
        scores = [(line["round"], line["eval"]) for line in run.history if "eval" in line]
        curves = {metric: [(number, eval_[metric]) for number, eval_ in scores] for metric in self.metrics}
        found: dict[str, float | None] = {
            f"best {metric}": best(curve, self.window) for metric, curve in curves.items()
        }
        if self.target is not None:
            found[f"rounds to {self.target:.0%}"] = rounds_to(curves[self.metrics[0]], self.target)
        if self.tempered and isinstance(run.posterior, Gaussian) and isinstance(setting.test, Dataset):
            found |= tempered(run, setting.test)
        return {name: float(value) for name, value in found.items() if value is not None}

    def compare(self, options: Options) -> Comparison:
        mine = self.quick() if options.quick else self
        return compared(
            self.name, self.title, f"{self.text} {TEXT}", options, mine.methods(),
            lambda seed: self.setting(seed, options.quick), measure=mine.measure,
            paper={} if options.quick else self.paper, rounds=mine.rounds, cohort=mine.cohort,
            evaluate_every=mine.every, checkpoint_every=50, engine=mine.engine,
        )  # fmt: skip

    def recipe(self, seeds: int) -> Recipe:
        return Recipe(self.name, self.title, self.compare, seeds=seeds)


def tempered(run: Run, test: Dataset) -> dict[str, float]:
    """The temperature that is fitted on every second test example, and the marginal scores of the others with it and
    without."""
    fitted, others = temper(run.network, run.posterior, test[::2]), test[1::2]
    scores = {"temperature": fitted.temperature}
    for name, belief in (("T fitted", fitted(run.posterior)), ("T = 1", run.posterior)):
        marginal = evaluate(run.network, belief, others).marginal or {}
        scores |= {f"{metric}, {name}": marginal[metric] for metric in ("accuracy", "nll", "ece")}
    return scores


def mnist_writers(seed: int, quick: bool) -> Setting:
    """MNIST, a client for each writer; other writers wrote the test digits."""
    data = load("mnist-writers")
    return Setting(
        Classification(seeded(seed, lambda: mlp(data.train.x.shape[1:], 10, (20,) if quick else (200,)))),
        partition.by_group(data.train, "writer"),
        about(data.test, 200) if quick else data.test,
    )


def cifar10(seed: int, quick: bool) -> Setting:
    """10,000 images of CIFAR-10 at 50 clients, Dirichlet 0.1 over labels; a CNN small enough for two cores."""
    data = load("cifar10")
    some = data.train[:: 25 if quick else 5]

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
        )  # fmt: skip

    return Setting(
        Classification(seeded(seed, network), augment=Compose((Crop(24), Flip()))),
        partition.dirichlet(some, clients=50, alpha=0.1, seed=seed, minimum=20),
        about(data.test, 200) if quick else data.test,
    )


def cifar100(seed: int, quick: bool) -> Setting:
    """CIFAR-100 at 500 clients by Pachinko allocation, with the network and the images of FedEP's authors: 24×24 crops
    of pixels in [0, 1], every image standardised on its own."""
    data = load("cifar100")
    train, test = (replace(part, scale=torch.tensor(1 / 255), shift=None) for part in (data.train, data.test))
    augment = Compose((Crop(24), Flip(), Standardize()))
    network = seeded(seed, lambda: resnet18_v2((3, 24, 24), 100, width=2 if quick else 64))
    return Setting(
        Classification(network, augment=augment),
        partition.pachinko(about(train, 200) if quick else train, clients=10 if quick else 500, seed=seed),
        about(test, 200) if quick else test,
    )


def emnist62(seed: int, quick: bool) -> Setting:
    """EMNIST with 62 classes by writer, and the CNN of the federated benchmarks."""
    data = load("emnist-62")
    channels, hidden = ((4, 4), 16) if quick else ((32, 64), 128)
    return Setting(
        Classification(seeded(seed, lambda: cnn(data.train.x.shape[1:], 62, channels, hidden))),
        partition.by_group(data.train, "writer", minimum=1),
        about(data.test, 200) if quick else data.test,
    )


CIFAR100 = Benchmark(
    name="fedep-cifar100", title="CIFAR-100 at 500 clients",
    text="500 clients of 100 images by Pachinko allocation, 20 a round; the network, first weights and images of the "
    "authors' code: ResNet-18 v2 with GroupNorm on 24×24 crops, every image standardised.", setting=cifar100,
    train=SGD(lr=0.01, momentum=0.9, epochs=10, batch_size=20, weight_decay=1e-4),
    server=Momentum(lr=0.5, momentum=0.9), rounds=1500, switch=401, cohort=20, kappa=500, s0=0.0, mixed=True,
    stateful_laplace_epochs=10, augmented=True, tempered=True, clips={"I": 100, "M": 300, "L": 6500, "V": 2000},
    target=0.45,
    paper=published(
        {
            "FedAvg": {"best accuracy": 0.462, "rounds to 45%": 911, "ece": 0.195},
            "FedPA": {"best accuracy": 0.484, "rounds to 45%": 811, "ece": 0.136},
            "FedEP(I)": {"best accuracy": 0.507, "rounds to 45%": 473, "ece": 0.049, "ece (marginal)": 0.079},
            "FedEP(M)": {"best accuracy": 0.504, "rounds to 45%": 461, "ece": 0.059, "ece (marginal)": 0.046},
            "FedEP(L)": {"best accuracy": 0.477, "rounds to 45%": 523, "ece": 0.088, "ece (marginal)": 0.066},
            "FedEP(V)": {"best accuracy": 0.496, "rounds to 45%": 487, "ece": 0.059, "ece (marginal)": 0.022},
            "FedSEP(I)": {"best accuracy": 0.489, "rounds to 45%": 438},
            "FedSEP(V)": {"best accuracy": 0.485, "rounds to 45%": 440},
        }
    ),
)  # fmt: skip
EMNIST62 = Benchmark(
    name="fedep-emnist62", title="EMNIST with 62 classes by writer", text="A CNN, 3,400 writers, 100 a round.",
    setting=emnist62, train=SGD(lr=0.01, momentum=0.9, epochs=20, batch_size=20),
    server=Momentum(lr=0.5, momentum=0.9), rounds=500, switch=200, cohort=100, kappa=500, s0=1e-5,
    names="FedAvg FedProx FedPA FedSEP(I) FedSEP(M) FedSEP(L) FedSEP(V)", target=0.86,
    paper=published(
        {
            "FedAvg": {"best accuracy": 0.858, "rounds to 86%": 465},
            "FedPA": {"best accuracy": 0.865, "rounds to 86%": 246},
            **{f"FedSEP({letter})": {"best accuracy": 0.866, "rounds to 86%": 228} for letter in "IMLV"},
        }
    ),
)  # fmt: skip
MNIST_WRITERS = Benchmark(
    name="fedep-mnist-writers", title="MNIST by its 539 writers",
    text="Every client holds the digits of one writer, about 116; the test digits are by other writers.",
    setting=mnist_writers, train=SGD(lr=0.02, momentum=0.9, epochs=5, batch_size=20, weight_decay=1e-4),
    server=Momentum(lr=0.5, momentum=0.9), rounds=70, switch=30, cohort=20, kappa=50, s0=0.0, laplace_epochs=2,
    laplace_batch=100, ngvi_epochs=3, ngvi_samples=2, target=0.96, window=10, every=5,
)  # fmt: skip
CIFAR10 = Benchmark(
    name="fedep-cifar10", title="CIFAR-10 with skewed labels",
    text="A small CNN, 10,000 images at 50 clients, labels by Dirichlet 0.1, 10 clients a round; from JPEG copies.",
    setting=cifar10, train=SGD(lr=0.01, momentum=0.9, epochs=3, batch_size=20, weight_decay=1e-4),
    server=Momentum(lr=1.0), rounds=80, switch=40, cohort=10, kappa=500, s0=0.0, laplace_epochs=1, laplace_batch=20,
    ngvi_epochs=1, ngvi_samples=2, target=0.35, window=20, every=10,
)  # fmt: skip

RECIPES = (CIFAR100.recipe(1), EMNIST62.recipe(1), MNIST_WRITERS.recipe(3), CIFAR10.recipe(3))
