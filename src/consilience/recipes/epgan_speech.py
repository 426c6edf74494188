"""EP-GAN on speech: features of discriminators that learned without labels, and the EP prior on an acoustic model."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from consilience.algorithms import FedAvg, ProbGAN, SignalEPGAN
from consilience.algorithms.base import algorithm
from consilience.algorithms.gan.players import Players
from consilience.algorithms.gan.signal_epgan import SIGNAL
from consilience.algorithms.switch import Method
from consilience.core import Count, NonNegative, TaskError, keys
from consilience.data import Batch, Dataset, Federation, Ragged
from consilience.data.loaders.speech import normalised
from consilience.metrics import PrecisionRecall
from consilience.models import mlp_discriminator, mlp_generator
from consilience.optim import Adam
from consilience.recipes.base import Options, Recipe, finished, published, seeded
from consilience.recipes.fednp_speech import compared_on
from consilience.recipes.speech_setting import QUICK, TEXT, WER, Speech
from consilience.runs import Storage, fit
from consilience.studies import Comparison, Setting
from consilience.studies.comparison import Row
from consilience.tasks import Adversarial, Task

NAME, TITLE = "epgan-speech", "EP-GAN on AN4, groups of speakers as clients"
PLAIN, EP_PLAIN, PROB, EP, EP_EP = "SRU", "SRU (EP)", "SRU, ProbGAN", "SRU, EP-ProbGAN", "SRU (EP), EP-ProbGAN"
PAPER = published({name: {WER: rate} for name, rate in ((PLAIN, 0.686), (PROB, 0.669), (EP, 0.662), (EP_EP, 0.643))})
ABOUT = (
    "GANs learn windows of frames at all clients without labels; the last hidden layer of their discriminators then "
    "gives every frame further features, which are joined to the acoustic model's input. All rows average the "
    "acoustic model as FedAvg does; “(EP)” adds the EP prior on its weights. In the paper GAN and acoustic model learn "
    "together; here one after the other. The paper's figures are of another corpus, CHiME-5: only differences can be "
    "compared."
)


@algorithm
class EPAveraging(SignalEPGAN):
    """FedAvg with EP-GAN's prior on a supervised network: p₀ = N(w, `scale`²) around the averaged weights w, and sites
    of the likelihood Π_i σ(f θ_i) with one number f, a network of the features before the last linear layer.

    The energy of the prior is a sum over all weights, and the loss a mean over examples: λ = 1e-3, the default of GANs,
    keeps an acoustic model from learning."""

    strength: NonNegative = 1e-4
    history: bool = False
    critic_steps: Count | None = None
    hidden: int = 64

    @property
    def name(self) -> str:
        return "EP-Averaging"

    def adapt(self, task: Task, seed: int) -> Task:
        task.need_labels()
        if self.components > 1:
            raise TaskError(f"{self.name} has one prior: leave components at 1")
        if task.main.head is None:
            raise TaskError(f"{self.name} needs a linear layer, before which it finds features")
        features = int(task.module.get_submodule(task.main.head).in_features)  # type: ignore[arg-type]
        with keys.seeded(seed, purpose="networks"):
            signal = nn.Sequential(nn.Linear(features, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 1))
        return task.extend(**{SIGNAL: signal})

    def game(self, task: Task, theta: Tensor, batch: Batch, past: Tensor) -> Tensor:
        """The acoustic model's own loss."""
        return task.loss_one(theta, batch)


@dataclass(frozen=True)
class Gans:
    """The GANs: windows of `context` frames every `every` frames; the discriminator's last hidden layer has
    `bottleneck` units."""

    context: int = 9
    every: int = 3
    hidden: int = 256
    bottleneck: int = 24
    latent: int = 32
    samples: int = 4
    train: Adam = field(default_factory=lambda: Adam(lr=3e-4, beta1=0.5, batch_size=128, epochs=2, noise=6e-4))
    rounds: int = 20
    judged: int = 1000

    def methods(self) -> dict[str, Players]:
        """ProbGAN and EP-ProbGAN, by the names of their rows."""
        return {PROB: ProbGAN(self.train), EP: SignalEPGAN(self.train, hidden=64)}

    def task(self, bands: int, seed: int) -> Adversarial:
        """The GAN with the initial weights of a seed."""
        size = (self.context * bands,)
        hidden = (self.hidden, self.hidden)
        generator = seeded(seed, lambda: mlp_generator(self.latent, size, hidden))
        discriminator = seeded(seed, lambda: mlp_discriminator(size, (*hidden, self.bottleneck)))
        return Adversarial(
            generator,
            discriminator,
            latent=self.latent,
            generators=self.samples,
            discriminators=self.samples,
            judges=(PrecisionRecall(count=self.judged),),
        )

    def features(self, method: Players, study: Speech, seed: int, out: Path | None) -> nn.Module:
        """The discriminators' hidden layers, learned from the windows of all clients."""
        train, _ = study.data()
        federation = study.federation(train, seed)
        owner = torch.empty(len(train), dtype=torch.int64)
        owner[federation.order] = torch.arange(len(federation)).repeat_interleave(federation.sizes)
        seen, rows = windows(train.x, self.context, self.every)
        clients = Federation.from_owner(Dataset(seen, torch.zeros(len(seen)), name="windows"), owner[rows])
        run = fit(
            method, self.task(train.x.shape[-1], seed), clients, rounds=self.rounds, seed=seed, engine=study.engine,
            out=Storage(out, checkpoint_every=self.rounds), resume=out is not None and (out / "run.json").exists(),
            progress=False,
        )  # fmt: skip
        assert isinstance(run.task, Adversarial)
        return run.task.trunk(run.posterior.mean).cpu()


QUICK_GANS = Gans(
    context=5, every=6, hidden=16, bottleneck=4, latent=4, samples=2, rounds=1, judged=64,
    train=Adam(lr=1e-3, beta1=0.5, batch_size=64, noise=6e-4),
)  # fmt: skip


def windows(x: Ragged, context: int, every: int = 1) -> tuple[Tensor, Tensor]:
    """(`context` frames around every `every`-th frame of all utterances, [M, context · bands]; their rows [M]). Frames
    beyond an utterance are 0."""
    row = torch.arange(len(x)).repeat_interleave(x.sizes)
    place = torch.arange(len(x.values)) - x.offsets[row]
    chosen = (place % every == 0).nonzero().flatten()
    row, at = row[chosen], chosen.unsqueeze(1) + torch.arange(context) - context // 2
    inside = (at >= x.offsets[row].unsqueeze(1)) & (at < x.offsets[row + 1].unsqueeze(1))
    found = x.values[torch.where(inside, at, 0)]
    return found.masked_fill(~inside.unsqueeze(-1), 0).flatten(1), row


def joined(data: Dataset, trunk: nn.Module, context: int) -> Dataset:
    """Utterances whose frames have the features of `trunk` for their windows in addition, with the mean and variance of
    a speaker removed."""
    seen, rows = windows(data.x, context)
    with torch.no_grad():
        more = torch.cat([trunk(part.float()) for part in torch.split(seen, 10_000)])
    more = normalised(more, data.groups["speaker"][rows])
    values = torch.cat([data.x.values, more], 1)
    return replace(data, x=Ragged.from_values(values, data.x.offsets, lengths=data.x.lengths))


def setting(study: Speech, gans: Gans, row: str, out: Path | None) -> Callable[[int], Setting]:
    """The setting of a row for each seed: with the features of its GAN, if it has one."""
    made = {PROB: PROB, EP: EP, EP_EP: EP}.get(row)
    if made is None:
        return study.setting

    def with_features(seed: int) -> Setting:
        where = None if out is None else out / made / f"seed-{seed}"
        trunk = gans.features(gans.methods()[made], study, seed, where)
        return study.setting(seed, lambda data: joined(data, trunk, gans.context))

    return with_features


def methods(study: Speech) -> dict[str, Method]:
    """How the acoustic model of each row learns."""
    train = study.chain(study.rounds, study.train)
    plain, prior = FedAvg(train), EPAveraging(train)
    return {PLAIN: plain, EP_PLAIN: prior, PROB: plain, EP: plain, EP_EP: prior}


def run(options: Options) -> Comparison:
    """All rows."""
    start, rows = time.perf_counter(), list[Row]()
    study, gans = (QUICK, QUICK_GANS) if options.quick else (Speech(), Gans())
    for name, method in methods(study).items():
        at = setting(study, gans, name, options.out / "gans")
        found = compared_on(study, {name: method}, options, study.rounds, name, at).rows
        rows += [replace(row, paper=PAPER.get((row.method, row.metric))) for row in found]
    return finished(NAME, TITLE, TEXT + ABOUT, options, rows, [], start)


RECIPE = Recipe(NAME, TITLE, run, seeds=3)
