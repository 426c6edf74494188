"""EP-GAN on images: every client has one class, or all clients have all classes."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import nn

from consilience.algorithms import EPGAN, F2A, Algorithm, BayesGAN, FedAvgGAN, FedGAN, Pooled, ProbGAN, SignalEPGAN
from consilience.data import Dataset, Federation, load, partition
from consilience.engines.simulator import Simulator
from consilience.figures.pictures import Picture, Pictures
from consilience.figures.pictures import Row as PictureRow
from consilience.metrics import Classified, InceptionDistance, Judge, PrecisionRecall
from consilience.models import cnn, dcgan_discriminator, dcgan_generator
from consilience.optim import Adam, AMSGrad
from consilience.recipes.base import Options, Recipe, finished, seeded
from consilience.recipes.epgan_variants import Spring
from consilience.runs import Storage, fit
from consilience.studies import Setting, compare
from consilience.studies.comparison import Comparison, Row
from consilience.tasks import Adversarial, Classification, LeastSquares, Objective

GAN, BAYES, PROB, FEDAVG, F2AFED = "GAN", "BayesGAN", "ProbGAN", "FedAvg-GAN", "F2A"
EPB, EP, MIXTURE, SPRING, SAMPLES = "EP-BGAN", "EP-ProbGAN", "Mixture-EP-ProbGAN", "EP-ProbGAN, f = 0", "EP, samples"
NON_IID = "non-iid"
FEW = 12  # examples of a class in a quick run: two batches
SERVED = 6  # steps a round of methods that train the generator at the server
Figures = Mapping[str, tuple[float, float, float]]
WASSERSTEIN: Figures = {  # FID of the paper's table, in the order of the splits
    GAN: (69.94, 45.87, 28.98),
    PROB: (65.74, 41.92, 27.38),
    FEDAVG: (95.89, 70.10, 50.25),
    F2AFED: (76.94, 61.87, 48.98),
    EPB: (54.94, 42.09, 25.75),
    EP: (52.47, 42.11, 27.23),
    MIXTURE: (51.92, 40.55, 27.30),
}
LEAST_SQUARES: Figures = {
    GAN: (72.34, 55.33, 30.21),
    PROB: (87.07, 60.62, 30.84),
    FEDAVG: (109.65, 83.41, 57.72),
    F2AFED: (90.34, 72.59, 55.21),
    EPB: (72.79, 64.37, 30.56),
    EP: (76.26, 62.86, 30.10),
    MIXTURE: (73.74, 62.52, 30.60),
}
TEXT = (
    "DCGANs with GroupNorm; a generator's step at every discriminator's, Adam with β₁ = 0.5 (the Bayesian ones with "
    "noise). GAN, FedAvg-GAN and F2A have one generator and one discriminator; others ten and four, which share all "
    "but the generators' first and the discriminators' last layer. FedAvg-GAN and F2A train the generator at the "
    f"server, {SERVED} steps a round, as many in all. “EP-ProbGAN, f = 0” is the ablation without any signal "
    "from clients: the prior pulls to the averaged networks; “EP, samples” has sites from the chains' moments. "
    "“classifier score” has the Inception Score's formula with a classifier of these data; “classifier distance” is "
    "the Fréchet distance of its features; “classes” are those with a fifth of their share among the samples."
)


@dataclass(frozen=True)
class Images:
    """The experiment on one data set."""

    name: str
    data: str
    splits: tuple[str, ...]
    width: int
    train: Adam
    rounds: int
    latent: int = 100
    scale: float = 0.03  # the standard deviation of EP's p₀
    each: int | None = None  # training examples of a class, if not all
    objective: Objective | None = None
    paper: Figures | None = None  # with figures of a paper, FID is measured

    def methods(self) -> dict[str, Algorithm]:
        """The paper's methods, and two more."""
        plain, noisy = self.train, replace(self.train, noise=6e-4)
        served, generator = replace(plain, epochs=1, longest=SERVED), replace(plain, epochs=1, longest=None)
        ep = SignalEPGAN(noisy, scale=self.scale)
        return {
            GAN: FedGAN(plain, single=True),
            BAYES: BayesGAN(noisy),
            PROB: ProbGAN(noisy),
            FEDAVG: FedAvgGAN(served, generator, steps=SERVED, single=True),
            F2AFED: F2A(served, generator, steps=SERVED, single=True),
            EPB: replace(ep, history=False),
            EP: ep,
            MIXTURE: replace(ep, components=10),
            SPRING: Spring(noisy, scale=self.scale),
            SAMPLES: EPGAN(noisy, scale=self.scale),
        }

    def setting(self, split: str, seed: int, quick: bool) -> Setting:
        """The task and the federation of one split and seed."""
        train, test = images(self.data, FEW if quick else self.each)
        shape, width = train.x.shape[1:], 4 if quick else self.width
        generator, discriminator = (
            seeded(seed, lambda: dcgan_generator(self.latent, shape, width)),
            seeded(seed, lambda: dcgan_discriminator(shape, width)),
        )
        task = Adversarial(
            generator,  # type: ignore[arg-type]
            discriminator,  # type: ignore[arg-type]
            latent=self.latent,
            generators=10,
            discriminators=4,
            objective=self.objective,
            judges=self.judges(quick),
        )
        return Setting(task, shared_out(train, split, seed), test)

    def judges(self, quick: bool) -> tuple[Judge, ...]:
        """A classifier of these data, and FID, or else precision and recall."""
        count = 64 if quick else 2000
        judge = Classified(classifier(self.data, quick), count=count)
        return judge, InceptionDistance() if self.paper and not quick else PrecisionRecall(count=count)

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
        steps = self.rounds * self.train.epochs * self._batches(split)
        found: list[Comparison] = []
        paper = {(method, "fid"): figures[index] for method, figures in (self.paper or {}).items()}
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
    """One of the paper's three splits."""
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
def classifier(name: str, quick: bool) -> nn.Module:
    """A small classifier of the training images, trained on pooled data."""
    train, _ = images(name, FEW if quick else 1000)
    module = seeded(0, lambda: cnn(train.x.shape[1:], 10, channels=(4, 8) if quick else (32, 64)))
    chain = AMSGrad(lr=1e-3, epochs=1 if quick else 5, batch_size=50)
    run = fit(
        Pooled(chain), Classification(module), Federation.from_owner(train, train.y * 0), rounds=1, progress=False
    )
    return run.model.eval()


def _picture(samples: Mapping[str, str] | None) -> Picture | None:
    return None if samples is None else Picture(samples["generated"])


ADAM = Adam(lr=3e-4, beta1=0.5, batch_size=128, epochs=10, longest=40)  # 400 updates a round
SPLITS = (NON_IID, "iid, K=10", "iid, K=2")
FMNIST = Images(
    "epgan-fmnist", "fashion-mnist", (NON_IID,), 16, replace(ADAM, lr=1e-3, batch_size=32, epochs=2), 15, 32, each=600
)
CIFAR10 = Images("epgan-cifar10", "cifar10", SPLITS, 64, ADAM, 25, scale=0.1, paper=WASSERSTEIN)
CIFAR10_LS = replace(CIFAR10, name="epgan-cifar10-ls", objective=LeastSquares(), paper=LEAST_SQUARES)
RECIPES = (
    FMNIST.recipe("EP-GAN on Fashion-MNIST, one kind of clothing a client", 1),
    CIFAR10.recipe("EP-GAN on CIFAR-10, three splits, WGAN-GP", 1),
    CIFAR10_LS.recipe("EP-GAN on CIFAR-10, three splits, LS-GAN", 1),
)
