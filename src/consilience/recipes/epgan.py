"""EP-GAN on images: every client has one class, or all clients have all classes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import nn

from consilience.algorithms import EPGAN, F2A, Algorithm, BayesGAN, FedAvgGAN, FedGAN, Pooled, ProbGAN, SignalEPGAN
from consilience.algorithms.gan.players import NOISE, Players
from consilience.data import Dataset, Federation, load, partition
from consilience.data.augment import Augmentation, Flip
from consilience.engines.simulator import Simulator
from consilience.figures.pictures import Picture, Pictures
from consilience.figures.pictures import Row as PictureRow
from consilience.metrics import Classified, InceptionDistance, Judge, PrecisionRecall
from consilience.models import Pair, cnn, dcgan, resnet_gan
from consilience.optim import Adam, AMSGrad
from consilience.recipes.base import Options, Recipe, finished, seeded
from consilience.recipes.epgan_variants import MeanOnly, Spring
from consilience.runs import Storage, fit
from consilience.studies import Setting, compare
from consilience.studies.comparison import Comparison, Row
from consilience.tasks import Adversarial, Classification, LeastSquares, Objective

GAN, BAYES, PROB, FEDAVG, F2AFED = "GAN", "BayesGAN", "ProbGAN", "FedAvg-GAN", "F2A"
EP, SPRING, MEAN = "EP-ProbGAN", "EP-ProbGAN, f = 0", "EP-ProbGAN, mean only"
GENERATOR, CRITIC = "EP-ProbGAN, generator only", "EP-ProbGAN, discriminator only"
EPB, EPF, MIXTURE = "EP-BGAN, f", "EP-ProbGAN, f", "Mixture-EP-ProbGAN, f"
NON_IID, POOLED = "non-iid", "pooled"
FEW = 12  # examples of a class in a quick run: two batches
SERVED = 6  # steps a round of methods that train the generator at the server
Figures = Mapping[str, tuple[float, float, float]]
WASSERSTEIN: Figures = {  # FID of the paper's table, in the order of the splits
    GAN: (69.94, 45.87, 28.98),
    PROB: (65.74, 41.92, 27.38),
    FEDAVG: (95.89, 70.10, 50.25),
    F2AFED: (76.94, 61.87, 48.98),
    EPB: (54.94, 42.09, 25.75),
    EPF: (52.47, 42.11, 27.23),
    MIXTURE: (51.92, 40.55, 27.30),
}
LEAST_SQUARES: Figures = {
    GAN: (72.34, 55.33, 30.21),
    PROB: (87.07, 60.62, 30.84),
    FEDAVG: (109.65, 83.41, 57.72),
    F2AFED: (90.34, 72.59, 55.21),
    EPB: (72.79, 64.37, 30.56),
    EPF: (76.26, 62.86, 30.10),
    MIXTURE: (73.74, 62.52, 30.60),
}
TEXT = (
    "Generators with BatchNorm, discriminators without normalisation; the generator steps after the first of every few "
    "batches, and samples are of its moving average; Adam (the Bayesian ones with noise). GAN, FedAvg-GAN and F2A have "
    "one generator and one discriminator; others ten and four, which share all but the generators' first and the "
    "discriminators' last layer. FedAvg-GAN and F2A train the generator at the server. “EP-ProbGAN” has sites from the "
    "chains' moments; “f = 0” is its ablation without sites, “mean only” that with one precision for all weights, "
    "“generator only” and “discriminator only” those with a prior for one player. “f” has the paper's likelihood, one "
    "number for all weights. “classifier score” has the Inception Score's formula with a classifier of these data; "
    "“classifier distance” is the Fréchet distance of its features; “classes” are those with a fifth of their share "
    "among the samples, “class coverage” is the mean share of a fair share. Names have the number of samples."
)


@dataclass(frozen=True)
class Images:
    """The experiment on one data set. `critic_steps` batches make one step of the generator."""

    name: str
    data: str
    splits: tuple[str, ...]
    pair: Callable[[Sequence[int], bool], Pair]  # of the examples' shape; small for a quick run
    train: Adam
    rounds: int
    critic_steps: int = 5
    average: float = 0.999
    scale: float = 0.03  # the standard deviation of EP's p₀
    each: int | None = None  # training examples of a class, if not all
    augment: Augmentation | None = None
    objective: Objective | None = None
    paper: Figures | None = None  # with figures of a paper, FID is measured

    def methods(self) -> dict[str, Algorithm]:
        """The paper's methods, EP-GAN with sites from chains, and its ablations."""
        plain, noisy = self.train, replace(self.train, noise=NOISE)
        served = replace(plain, epochs=1, longest=self.critic_steps * SERVED)
        generator = replace(plain, epochs=1, longest=None)
        ep, signal = EPGAN(noisy, scale=self.scale), SignalEPGAN(noisy, scale=self.scale)
        found: dict[str, Algorithm] = {
            GAN: FedGAN(plain, single=True),
            BAYES: BayesGAN(noisy),
            PROB: ProbGAN(noisy),
            FEDAVG: FedAvgGAN(served, generator, steps=SERVED, single=True),
            F2AFED: F2A(served, generator, steps=SERVED, single=True),
            EP: ep,
            SPRING: Spring(noisy, scale=self.scale),
            MEAN: MeanOnly(noisy, scale=self.scale),
            GENERATOR: replace(ep, layers=(("discriminator", 0.0),)),
            CRITIC: replace(ep, layers=(("generator", 0.0),)),
            EPB: replace(signal, history=False),
            EPF: signal,
            MIXTURE: replace(signal, components=10),
        }
        return {
            label: replace(method, critic_steps=self.critic_steps, average=self.average)
            if isinstance(method, Players)
            else method
            for label, method in found.items()
        }

    def setting(self, split: str, seed: int, quick: bool) -> Setting:
        """The task and the federation of one split and seed."""
        train, test = images(self.data, FEW if quick else self.each)
        pair = seeded(seed, lambda: self.pair(train.x.shape[1:], quick))
        task = Adversarial(
            pair.generator,
            pair.discriminator,
            latent=pair.latent,
            generators=10,
            discriminators=4,
            objective=self.objective,
            augment=self.augment,
            judges=self.judges(quick, train),
        )
        return Setting(task, shared_out(train, split, seed), test)

    def judges(self, quick: bool, train: Dataset) -> tuple[Judge, ...]:
        """A classifier of these data, precision and recall by its features, and FID against test and training data."""
        count, module = 64 if quick else 2000, classifier(self.data, FEW if quick else self.each or 1000)
        judges = Classified(module, count=count), PrecisionRecall(count=count, features=hidden(module))
        return (*judges, InceptionDistance(training=train)) if self.paper and not quick else judges

    def run(self, options: Options) -> Comparison:
        """All methods on all splits over all seeds, in one table, with generated samples."""
        start = time.perf_counter()
        rows: list[Row] = []
        made: dict[str, dict[str, Picture | None]] = {}
        for index, split in enumerate(self.splits[:1] if options.quick else self.splits):
            suffix = "" if len(self.splits) == 1 or options.quick else f", {split}"
            for found in self.on(split, index, options):
                rows += [replace(row, metric=f"{row.metric}{suffix}") for row in found.rows]
                for method, stored in found.stored().items():
                    made.setdefault(method, {})[split] = _picture(stored[0].evaluation.get("samples"))
        columns = list(next(iter(made.values())))
        figure = Pictures(
            "Generated samples",
            "Samples of the first seed's generators after the last round, eight a row.",
            columns,
            [PictureRow(method, [cells.get(split) for split in columns]) for method, cells in made.items()],
        )
        return finished(self.name, f"GANs of {self.data} from ten clients", TEXT, options, rows, [figure], start)

    def on(self, split: str, index: int, options: Options) -> list[Comparison]:
        """All methods on one split. Methods with the generator at the server take as many steps in more rounds."""
        quick = options.quick
        steps = self.rounds * self.train.epochs * self._batches(split) // self.critic_steps
        found: list[Comparison] = []
        paper = {(method, "fid@10000"): figures[index] for method, figures in (self.paper or {}).items()}
        for served in (False, True):
            chosen = {k: m for k, m in self.methods().items() if isinstance(m, FedAvgGAN | F2A) == served}
            rounds = 2 if quick else -(-steps // SERVED) if served else self.rounds
            if quick:
                chosen = {k: quickly(m) for k, m in chosen.items() if k in (GAN, FEDAVG, EP) or self is FMNIST}
            where = Path(options.out) / split / ("served" if served else "averaged")
            compared = compare(
                chosen, lambda seed: self.setting(split, seed, quick), seeds=options.seeds,
                out=Storage(where, checkpoint_every=max(1, rounds // 25)), title=f"{self.data}, {split}",
                resume=options.resume, on_run=lambda method, seed: options.tell(f"{split}, {method}", seed),
                paper={} if quick else paper, rounds=rounds, evaluate_every=max(1, rounds // 5),
                engine=Simulator(chunk=10, workers=1, threads=1) if quick else Simulator(), progress=False,
            )  # fmt: skip
            found.append(compared)
        return found

    def _batches(self, split: str) -> int:
        federation = shared_out(images(self.data, self.each)[0], split, 0)
        return int(self.train.batches(federation.sizes.double()).max())

    def recipe(self, title: str, seeds: int) -> Recipe:
        return Recipe(self.name, title, self.run, seeds=seeds)


def quickly(method: Algorithm) -> Algorithm:
    """A method with little work, for a quick run."""
    short = replace(method.train, epochs=1, batch_size=8)  # type: ignore[attr-defined]
    return replace(method, train=short, **({"components": 2} if getattr(method, "components", 1) > 1 else {}))  # type: ignore[type-var]


def shared_out(data: Dataset, split: str, seed: int) -> Federation:
    """One of the paper's three splits, or all examples at one client."""
    if split == POOLED:
        return Federation.from_owner(data, torch.zeros_like(data.y))
    if split == NON_IID:
        return partition.one_label(data, 10, seed=seed)
    return partition.iid(data, int(split.split("K=")[1]), seed=seed)


def images(name: str, each: int | None) -> tuple[Dataset, Dataset]:
    """Training and test images in (−1, 1), with `each` training images of every class."""
    data = load(name).signed()
    train, test = data.train, data.test
    if each is not None:
        kept = torch.cat([(train.y == c).nonzero().flatten()[:each] for c in range(int(train.y.max()) + 1)])
        train = train[kept]
    return train, test


@cache
def classifier(name: str, each: int) -> nn.Module:
    """A small classifier of `each` training images of every class, trained on pooled data."""
    train, _ = images(name, each)
    module = seeded(0, lambda: cnn(train.x.shape[1:], 10, channels=(4, 8) if each == FEW else (32, 64)))
    chain = AMSGrad(lr=1e-3, epochs=1 if each == FEW else 5, batch_size=50)
    run = fit(
        Pooled(chain), Classification(module), Federation.from_owner(train, train.y * 0), rounds=1, progress=False
    )
    return run.model.eval()


def hidden(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A classifier's last hidden layer as a function of examples."""
    trunk = nn.Sequential(*list(module)[:-1])  # type: ignore[call-overload]
    return trunk


def _picture(samples: Mapping[str, str] | None) -> Picture | None:
    return None if samples is None else Picture(samples["generated"])


def small_dcgan(shape: Sequence[int], quick: bool) -> Pair:
    """DCGANs of width 8. So narrow, N(0, 0.02²) would be small initial weights."""
    return dcgan(shape, 32, 4 if quick else 8, init="orthogonal")


def wide_dcgan(shape: Sequence[int], quick: bool) -> Pair:
    """DCGANs of width 64."""
    return dcgan(shape, 100, 4 if quick else 64)


def residual(shape: Sequence[int], quick: bool) -> Pair:
    """Residual blocks with 4.3 and 1.1 million weights."""
    return resnet_gan(shape, 128, 4, 4) if quick else resnet_gan(shape)


SMALL = Adam(lr=1e-3, beta1=0.5, beta2=0.9, batch_size=32, epochs=4)
ADAM = Adam(lr=2e-4, beta1=0.5, batch_size=64, epochs=25)  # one label a client: 400 steps of the generator a round
SPLITS = (NON_IID, "iid, K=10", "iid, K=2")
FMNIST = Images(
    "epgan-fmnist", "fashion-mnist", (NON_IID,), small_dcgan, SMALL, 10, critic_steps=2, average=0.99, each=300
)
CIFAR10 = Images("epgan-cifar10", "cifar10", SPLITS, residual, ADAM, 25, augment=Flip(), paper=WASSERSTEIN)
CIFAR10_LS = replace(
    CIFAR10, name="epgan-cifar10-ls", pair=wide_dcgan, critic_steps=2, train=replace(ADAM, epochs=10),
    objective=LeastSquares(), paper=LEAST_SQUARES,
)  # fmt: skip
RECIPES = (
    FMNIST.recipe("EP-GAN on Fashion-MNIST, one kind of clothing a client", 1),
    CIFAR10.recipe("EP-GAN on CIFAR-10, three splits, WGAN-GP", 1),
    CIFAR10_LS.recipe("EP-GAN on CIFAR-10, three splits, LS-GAN", 1),
)
