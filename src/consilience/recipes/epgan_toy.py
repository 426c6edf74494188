"""EP-GAN's first example: four clients have one Gaussian each, and should learn all four."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from consilience.algorithms import EPGAN, Algorithm, BayesGAN, FedGAN, ProbGAN, SignalEPGAN, Switch
from consilience.algorithms.gan.players import NOISE
from consilience.algorithms.switch import Method
from consilience.core.records import rows as of_clients
from consilience.data import Cohort, Dataset, Federation
from consilience.engines import Simulator
from consilience.evaluation.samples import cells
from consilience.figures.pictures import Picture, Pictures, heat
from consilience.figures.pictures import Row as PictureRow
from consilience.metrics import Modes, density_mse, mixture_density
from consilience.models import mlp_discriminator, mlp_generator
from consilience.optim import Adam
from consilience.recipes.base import Options, Recipe, finished, rows_of, seeded
from consilience.recipes.epgan_variants import MeanOnly, Printed, Spring
from consilience.runs import Run, fit
from consilience.studies.comparison import Comparison
from consilience.studies.scores import paired_test
from consilience.tasks.adversarial import Adversarial

CENTRES = torch.tensor([[-3.0, 3.0], [3.0, 3.0], [-3.0, -3.0], [3.0, -3.0]])
BOX = (-5.0, -5.0), (5.0, 5.0)
GRID = 100  # the paper's 10,000 points
SAMPLES, LATENT = 4, 8  # of generators and of discriminators; numbers of noise
SEEDS = 1000  # the first: scales and paces were chosen on seeds below
WGAN, BAYES, PROB, EP = "WGAN", "BayesGAN", "ProbGAN", "EP-ProbGAN"
SPRING, MEAN, PRINTED = "EP-ProbGAN, f = 0", "EP-ProbGAN, mean only", "EP-ProbGAN, printed"
GENERATOR, CRITIC = "EP-ProbGAN, generator only", "EP-ProbGAN, discriminator only"
EPB, EPF, MIXTURE = "EP-BGAN, f", "EP-ProbGAN, f", "Mixture-EP-ProbGAN, f"
ONE_PLACE, ONE_PLACE_PROB, PAPERS_STEPS = (
    "WGAN, centralised",
    "ProbGAN, centralised",
    "WGAN, centralised, paper's steps",
)
ZERO, CONSTANT = "a map of zeros", "the best constant map"
MODES, GOOD, DMSE, LATE = "modes", "good_share", "d_mse", "modes, last quarter"
PAPER = {WGAN: 0.0723, PROB: 0.0505, EPF: 0.0450}
DRAWN_ROWS = (WGAN, PROB, EPF, SPRING, EP)
TRAIN = Adam(lr=1e-3, beta1=0.5, beta2=0.9, batch_size=50)
SCALE = 0.03
TEXT = (
    "Four clients, 1,000 points each of one of four Gaussians at (±3, ±3), variances drawn from [0.3, 0.5]. MLPs "
    "with two hidden layers of 32, LayerNorm in the generator; WGAN-GP; Adam 1e-3 in batches of 50, of which every "
    "fifth has a step of the generator. Bayesian methods have four generators and four discriminators. “modes” are the "
    "Gaussians with at least a fifth of their share of the samples within three deviations, “good_share” is the "
    "share of all samples there; “modes, last quarter” is the mean over evaluations in the last quarter of the "
    "rounds. As in the paper 50 epochs, then ten rounds of 20; “often” is 200 rounds of two epochs. “d_mse” "
    "compares the discriminator's map with the true density on 100 × 100 points, both scaled to [0, 1]: it cannot "
    "rank, as the trivial maps beside it show. “EP-ProbGAN” has sites from the chains' moments; “f = 0” is its "
    "ablation without sites, “mean only” that with one precision for all weights, “generator only” and “discriminator "
    "only” those with a prior for one player; “f” has the paper's likelihood, one number for all weights; “printed” "
    "also multiplies whole priors as the paper's algorithm does. p₀ has a deviation of 0.03. The paper's steps, 1e-4 "
    "and 2e-4, are simultaneous and make the generator the faster player."
)


@dataclass(frozen=True)
class Protocol:
    """`epochs` a round after `warm` ones in the first round."""

    suffix: str
    rounds: int
    epochs: int
    warm: int

    def method(self, method: Algorithm) -> Method:
        first, then = (with_epochs(method, epochs) for epochs in (self.warm, self.epochs))
        return then if self.warm == self.epochs else Switch(first, then, at=1)


PROTOCOLS = Protocol("", 11, 20, 50), Protocol(", often", 200, 2, 2)
QUICK = Protocol("", 2, 1, 2), Protocol(", often", 2, 1, 1)


def with_epochs(method: Algorithm, epochs: int) -> Algorithm:
    """A method whose clients train for so many epochs a round."""
    players = cast(Any, method)
    found: Algorithm = replace(players, train=replace(players.train, epochs=epochs))
    return found


def methods() -> dict[str, Algorithm]:
    """The paper's methods, EP-GAN with sites from chains, and its ablations."""
    noisy = replace(TRAIN, noise=NOISE)
    ep, signal = EPGAN(noisy, scale=SCALE), SignalEPGAN(noisy, scale=SCALE)
    return {
        WGAN: FedGAN(TRAIN, single=True),
        BAYES: BayesGAN(noisy),
        PROB: ProbGAN(noisy),
        EP: ep,
        SPRING: Spring(noisy, scale=SCALE),
        MEAN: MeanOnly(noisy, scale=SCALE),
        GENERATOR: replace(ep, layers=(("discriminator", 0.0),)),
        CRITIC: replace(ep, layers=(("generator", 0.0),)),
        EPB: replace(signal, history=False),
        EPF: signal,
        MIXTURE: replace(signal, components=4),
        PRINTED: Printed(noisy, scale=SCALE),
    }


def oracles() -> dict[str, Algorithm]:
    """Methods on pooled data."""
    slow = FedGAN(replace(TRAIN, lr=1e-4), single=True, critic_steps=None)
    return {ONE_PLACE: methods()[WGAN], ONE_PLACE_PROB: methods()[PROB], PAPERS_STEPS: slow}


@cache
def federation(seed: int, each: int) -> tuple[Federation, Tensor]:
    """Clients with one Gaussian each, and the variances of these."""
    generator = torch.Generator().manual_seed(SEEDS + seed)
    variances = 0.3 + 0.2 * torch.rand(len(CENTRES), generator=generator)
    y = torch.arange(len(CENTRES)).repeat_interleave(each)
    noise = torch.randn(len(y), 2, generator=generator)
    data = Dataset(CENTRES[y] + variances[y].sqrt().unsqueeze(1) * noise, y, name="four Gaussians")
    names = [f"client at ({x:+.0f}, {y:+.0f})" for x, y in CENTRES.tolist()]
    return Federation.from_owner(data, y, names=names), variances


def truth(seed: int, each: int) -> Tensor:
    """The density on the grid."""
    return mixture_density(cells(*BOX, GRID), CENTRES, federation(seed, each)[1])


@dataclass(frozen=True)
class Learned:
    """One run, and the weights after its first, middle and last round."""

    run: Run
    path: dict[int, Tensor]

    @property
    def scores(self) -> list[tuple[int, dict[str, float]]]:
        """(round, scores) of every evaluation."""
        return [(line["round"], line["eval"]) for line in self.run.history if "eval" in line]

    def late(self, metric: str) -> float:
        """The mean of a metric over the last quarter of the rounds."""
        last = self.scores[-1][0]
        return statistics.fmean(found[metric] for at, found in self.scores if at > 0.75 * last or at == last)

    def map(self, theta: Tensor, size: int = GRID) -> Tensor:
        """The discriminator's scores on the grid."""
        return self.run.task.predict(theta, cells(*BOX, size)).view(-1)


def learn(label: str, protocol: Protocol, seed: int, quick: bool, compile: bool = True) -> Learned:
    """Run one method by one protocol."""
    pooled, each = label in oracles(), 60 if quick else 1000
    clients, variances = federation(seed, each)
    task = Adversarial(
        seeded(seed, lambda: mlp_generator(LATENT, (2,))), seeded(seed, lambda: mlp_discriminator((2,))),
        latent=LATENT, generators=SAMPLES, discriminators=SAMPLES, pace=2.0 if label == PAPERS_STEPS else 1.0,
        judges=(Modes(CENTRES, variances.sqrt()),),
    )  # fmt: skip
    kept, path = {1, -(-protocol.rounds // 2), protocol.rounds}, {}

    def keep(run: Run, line: dict[str, Any]) -> None:
        if line["round"] in kept:
            path[line["round"]] = run.posterior.mean.clone()

    run = fit(
        protocol.method((oracles() | methods())[label]), task, clients.pooled() if pooled else clients,
        rounds=protocol.rounds, test=clients.data, seed=seed, evaluate_every=max(1, protocol.rounds // 40),
        engine=Simulator(device="cpu", chunk=len(CENTRES), workers=1, threads=1, compile=compile and not quick),
        progress=False, callbacks=[keep],
    )  # fmt: skip
    return Learned(run, path)


Runs = dict[str, list[Learned]]


def run(options: Options) -> Comparison:
    """Run every method by both protocols over all seeds."""
    start, found = time.perf_counter(), dict[str, Runs]()
    protocols = QUICK if options.quick else PROTOCOLS
    for protocol in protocols:
        by_method: Runs = {label: [] for label in (*oracles(), *methods())}
        found[protocol.suffix] = by_method
        for seed in range(options.seeds):
            for label, learned in by_method.items():
                options.tell(label + protocol.suffix, seed)
                learned.append(learn(label, protocol, seed, options.quick))
    scores = tabled(found, 60 if options.quick else 1000, options.seeds)
    return finished(
        "epgan-toy", "Four Gaussians at four clients", TEXT, options,
        rows_of(scores, {(method, DMSE): value for method, value in PAPER.items()}),
        [figure(f"Maps{suffix}", by_method) for suffix, by_method in found.items()], start,
        scores=[{"method": method, "metric": metric, "values": values} for (method, metric), values in scores.items()],
        paired=paired(scores),
    )  # fmt: skip


def tabled(found: Mapping[str, Runs], each: int, seeds: int) -> dict[tuple[str, str], list[float]]:
    """Scores over seeds, by (method, metric)."""
    scores: dict[tuple[str, str], list[float]] = {}
    maps = [truth(seed, each) for seed in range(seeds)]
    for suffix, by_method in found.items():
        for method, learned in by_method.items():
            for metric in (MODES, GOOD):
                scores[method, metric + suffix] = [one.scores[-1][1][metric] for one in learned]
            scores[method, LATE + suffix] = [one.late(MODES) for one in learned]
            scores[method, DMSE + suffix] = [
                density_mse(one.map(one.run.posterior.mean), true) for one, true in zip(learned, maps, strict=True)
            ]
    scaled = [true / true.max() for true in maps]  # the least is 0 to many digits
    scores[ZERO, DMSE] = [float(true.square().mean()) for true in scaled]
    scores[CONSTANT, DMSE] = [float(true.var(correction=0)) for true in scaled]
    return scores


def paired(scores: Mapping[tuple[str, str], list[float]]) -> list[dict[str, Any]]:
    """Paired differences of EP-ProbGAN from other methods."""
    entries = []
    for (method, metric), values in scores.items():
        if metric.startswith((MODES, GOOD)) and method != EP:
            pairs = list(zip(scores[EP, metric], values, strict=True))
            entries.append({"method": EP, "versus": method, "metric": metric, **paired_test(pairs)})
    return entries


def local(learned: Learned) -> list[Tensor]:
    """The server's networks after one more round with each client alone."""
    run, algorithm = learned.run, learned.run.algorithm
    ids = torch.arange(len(run.federation))
    cohort = Cohort(run.federation, ids, round=len(run.history) + 1, round_size=len(ids), seed=0)
    message = algorithm.message(run.server, ids)
    update, _ = algorithm.local(run.task, message, run.states.gather(ids), cohort)
    return [algorithm.posterior(algorithm.fuse(run.server, of_clients(update, k))).mean for k in ids.tolist()]


def figure(title: str, found: Runs) -> Pictures:
    """The first seed's density maps and samples: with pooled data, at clients, and at the server."""
    rows = []
    for method in DRAWN_ROWS:
        learned, oracle = found[method][0], found[ONE_PLACE if method == WGAN else ONE_PLACE_PROB][0]
        drawn = [picture(oracle, oracle.run.posterior.mean)]
        drawn += [picture(learned, theta) for theta in (*local(learned), *learned.path.values())]
        rows.append(PictureRow(method, drawn))
    names = [f"client {k}" for k in range(1, 1 + len(CENTRES))]
    rounds = [f"round {number}" for number in found[DRAWN_ROWS[0]][0].path]
    caption = (
        "Brighter means a higher score of the discriminators; dots are samples. Left: pooled data. Middle: the "
        "clients' own networks after one more local round. Right: the global networks."
    )
    return Pictures(title, caption, ["centralised", *names, *rounds], rows)


def picture(learned: Learned, theta: Tensor, size: int = 50) -> Picture:
    """A density map with 100 samples."""
    task = cast(Adversarial, learned.run.task)
    low, high = (torch.tensor(corner) for corner in BOX)
    made = (task.generate(theta, 100).cpu() - low) / (high - low)
    return heat(learned.map(theta, size).view(size, size), made.tolist())


RECIPE = Recipe("epgan-toy", "EP-GAN's toy: four Gaussians at four clients", run)
