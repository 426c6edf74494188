"""FedNP's benchmarks on images as its authors ran them, with what their public code does beside what the paper says."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from consilience.algorithms import FedAvg
from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.averaging import Averaging, change
from consilience.algorithms.switch import Method
from consilience.core import Point, Weighted, keys, record
from consilience.core.checks import Count, NonNegative
from consilience.data import Batch, Cohort, Compose, Crop, Dataset, Federation, Flip, Info, load
from consilience.engines.simulator import Simulator
from consilience.inference.latent import layer_weights
from consilience.models import resnet18
from consilience.models.npn import npn
from consilience.optim import SGD
from consilience.recipes.base import about, published, seeded
from consilience.recipes.fednp import Benchmark
from consilience.studies import Setting
from consilience.tasks.supervised import Classification
from consilience.tasks.task import Task

METHODS = ("FedAvg", "FedProx", "MOON", "SCAFFOLD", "FedDyn", "FedDC", "FedPA", "FedLA", "FedNP")
CIFAR100 = (0.629, 0.621, 0.631, 0.535, 0.620, 0.632, 0.634, 0.610, 0.650)
TINY = (0.519, 0.506, 0.514, 0.463, 0.473, 0.473, 0.496, 0.502, 0.532)
FASTER, PUBLISHED = "FedAvg, double step", "FedNP as published"
NETWORK = "npn"
LEAST, MOST = 1e-5, 5.0  # between which the published code clamps z


@record
class Client:
    """The client's natural-parameter network [K, …]."""

    npn: Tensor


@algorithm
class PublishedFedNP(Averaging):
    """What the published code of FedNP computes: FedAvg with a weak spring on the last layer.

    Its latent z has the same value at all clients, whatever their data: `z_of`. A natural-parameter network of the
    client's own maps z to N(μ, v) over the last layer's weights W, and λ · mean (W − μ)²/(2v + 1e-5) is added to the
    loss. The optimiser of this network also has the client's weights, whose gradient it follows once more:
    `double_step`. Clients count equally."""

    strength: NonNegative = 0.01
    latent: Count = 10
    hidden: Count = 10
    double_step: bool = True

    @property
    def name(self) -> str:
        return PUBLISHED

    def adapt(self, task: Task, seed: int) -> Task:
        task.need_labels()
        predicted = layer_weights(task, None)
        with keys.seeded(seed, purpose="networks"):
            network = npn(self.latent, self.hidden, predicted.stop - predicted.start)
            for parameter in network.parameters():
                nn.init.uniform_(parameter, -0.05, 0.05)
        return task.extend(**{NETWORK: network})

    def client(self, task: Task, info: Info, n: Tensor) -> Client:
        return Client(info.initial[task.slice(NETWORK)].repeat(len(n), 1))

    def z_of(self, round: int) -> float:
        """The mean of z in a round, as long as the code's |f| is below about 1.

        Removing the cavity turns every site into the least mean and variance in the first round. After that the sign
        of the variance is lost, and the mean is four times that of the round before, up to the most."""
        return min(MOST, LEAST * 4.0 ** max(round - 2, 0))

    def loss(self, task: Task, theta: Tensor, batch: Batch, z: Tensor) -> Tensor:
        """One client's loss, for a mean of z [latent]."""
        parts = task.split(theta)
        mu, v = task.call_one(NETWORK, parts[NETWORK], z, torch.full_like(z, LEAST), exact=True)
        off = theta[layer_weights(task, None)] - mu
        value: Tensor = task.loss_one(theta, batch) + self.strength * (off.square() / (2 * v + LEAST)).mean()
        return value

    def local(self, task: Task, message: Point, state: Client, cohort: Cohort) -> tuple[Weighted, Client]:
        w, own = message.theta, task.slice(NETWORK)
        start, pace = w.repeat(len(cohort), 1), torch.full_like(w, 2.0 if self.double_step else 1.0)
        start[:, own], pace[own] = state.npn, 1.0
        z = w.new_full((self.latent,), self.z_of(cohort.round))
        trained = self.train(task, start, cohort, loss=self.loss, shared=(z,), pace=pace)
        new = Client(trained[:, own].clone())
        trained[:, own] = w[own]
        return change(trained, w, torch.ones_like(cohort.n)), new


@dataclass(frozen=True)
class AsPublished:
    """What the published code does beside what the paper says. Without an option: GroupNorm, one step along a gradient,
    test images as they are."""

    batch_norm: bool = True
    """BatchNorm, whose running averages the server averages."""
    double_step: bool = True
    """“FedNP as published” takes every step twice."""
    augmented_test: bool = True
    """Test images are cropped and flipped at random, as training images are."""


AS_PUBLISHED = AsPublished()


def balanced(data: Dataset, clients: int, alpha: float, seed: int) -> Federation:
    """The published code's partition: every class in proportions by Dirichlet(α), the largest part to the client with
    the fewest examples so far, so that clients have nearly one size."""
    assert data.labels is not None
    labels, rng = data.labels.cpu().numpy(), np.random.default_rng([seed, 0xFED])
    owner, sizes = np.empty(len(labels), np.int64), np.zeros(clients, np.int64)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        parts = (rng.dirichlet(np.full(clients, alpha)) * len(rows)).astype(np.int64)
        parts[-1] += len(rows) - parts.sum()
        parts.sort()
        order = np.argsort(-sizes, kind="stable")
        owner[rows] = order.repeat(parts)
        sizes[order] += parts
    how = f"labels by Dirichlet, α = {alpha:g}, sizes nearly equal"
    return Federation.from_owner(data, torch.from_numpy(owner), clients=clients, how=how)


def augmented(test: Dataset, change: Compose, seed: int) -> Dataset:
    """Test images of bytes, each changed once at random; their borders are black."""
    key = keys.key(seed, purpose="augmented test", client=torch.zeros(1, dtype=torch.int64))
    return replace(test, x=change(test.x.unsqueeze(0), key)[0])


def images(name: str, clients: int, seed: int, quick: bool, options: AsPublished) -> Setting:
    """A whole data set of small images, each client with its own mixture of labels; ResNet-18."""
    data = load(name)
    train, test = (about(part, 300) if quick else part for part in (data.train, data.test))
    clients, classes = 5 if quick else clients, len(data.train.classes)
    width, norm = 2 if quick else 64, "batch" if options.batch_norm else "group"
    module = seeded(seed, lambda: resnet18(train.x.shape[1:], classes, width=width, norm=norm))  # type: ignore[arg-type]
    augment = Compose((Crop(train.x.shape[-1], padding=4), Flip()))
    task = Classification(module, augment=augment, batch_norm="averaged" if options.batch_norm else "estimated")
    test = augmented(test, augment, seed) if options.augmented_test else test
    return Setting(task, balanced(train, clients, 0.5, seed), test)


def at_paper_size(
    name: str, data: str, clients: int, figures: Mapping[str, float], options: AsPublished = AS_PUBLISHED
) -> Benchmark:
    """The authors' setting, for a GPU. FedAvg has their rate, and once more that of the double step; “FedNP” is the
    paper's method with corrected formulas."""

    def more(train: SGD) -> dict[str, Method]:
        return {
            FASTER: FedAvg(replace(train, lr=2 * train.lr)),
            PUBLISHED: PublishedFedNP(train, double_step=options.double_step),
        }

    rows = ("FedAvg", FASTER, "FedNP", PUBLISHED)
    paper = {method: {"accuracy": value} for method, value in figures.items()}
    paper[PUBLISHED] = paper["FedNP"]
    return Benchmark(
        name=name, title=f"{data} at {clients} clients",
        text=f"Labels by Dirichlet 0.5, {clients} clients of nearly one size; ResNet-18, crops and flips, ten local "
        "epochs, as in the published code: " + ("BatchNorm with averaged statistics" if options.batch_norm else
        "GroupNorm") + (", cropped and flipped test images" if options.augmented_test else "") + ". “FedNP” is the "
        "paper's method with corrected formulas; “as published” is what the code computes, FedAvg with a double step "
        "and a weak spring.",
        setting=lambda seed, quick: images(data, clients, seed, quick, options),
        train=SGD(lr=0.01, epochs=10, batch_size=128, weight_decay=1e-5), rounds=100,
        names=(*rows, *(m for m in METHODS if m not in rows), "FedNP, f = 0"), few=rows, as_printed=True, more=more,
        every=1, engine=Simulator(precision="bf16" if torch.cuda.is_available() else "float32"),
        paper=published(paper),
    )  # fmt: skip


BENCHMARKS = (
    at_paper_size("fednp-cifar100", "cifar100", 10, dict(zip(METHODS, CIFAR100, strict=True))),
    at_paper_size("fednp-cifar100-50", "cifar100", 50, {"FedAvg": 0.613, "FedNP": 0.637}),
    at_paper_size("fednp-cifar100-100", "cifar100", 100, {"FedAvg": 0.508, "FedNP": 0.534}),
    at_paper_size("fednp-tinyimagenet", "tiny-imagenet", 10, dict(zip(METHODS, TINY, strict=True))),
)
RECIPES = tuple(benchmark.recipe(1) for benchmark in BENCHMARKS)
