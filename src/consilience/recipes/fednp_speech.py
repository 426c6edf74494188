"""FedNP on speech: groups of speakers, or speakers, as clients."""

import time
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from consilience.algorithms import MOON, FedAvg, FedEP, FedNP, FedProx, LocalOnly, Pooled, Switch
from consilience.algorithms.base import algorithm
from consilience.algorithms.switch import Method
from consilience.inference import Identity
from consilience.recipes.base import Options, Recipe, finished, published
from consilience.recipes.fednp import WithoutSignal
from consilience.recipes.speech_setting import CLIENTS, QUICK, TEXT, WER, Speech, worst_speaker
from consilience.runs.directory import Storage
from consilience.studies import Comparison, Setting, compare
from consilience.studies.comparison import Row

NAME, TITLE = "fednp-speech", "FedNP on AN4, speakers as clients"
PAPER = published({name: {WER: rate} for name, rate in (("FedAvg", 0.689), ("FedProx", 0.667), ("FedNP", 0.643))})
ABOUT = (
    "FedEP continues the first half of FedAvg's rounds. “FedNP, f = 0” is the ablation without any signal of clients. "
    "The paper's figures are of another corpus, CHiME-5, and of HMM states with a language model: only differences "
    "between methods can be compared."
)


@algorithm
class SpeechFedNP(FedNP):
    """FedNP whose network of f has two layers, as in the paper's experiment on speech."""

    @property
    def name(self) -> str:
        return "FedNP"

    def signal(self, features: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, self.hidden), nn.ReLU(), nn.Linear(self.hidden, self.latent))


def methods(study: Speech) -> dict[str, Method]:
    """All methods by name, with the paper's λ, d and size of the natural-parameter network."""
    train = study.chain(study.rounds, study.train)
    ours, without = (kind(train, strength=0.001, latent=16, hidden=32) for kind in (SpeechFedNP, WithoutSignal))
    return {
        "Pooled": Pooled(study.chain(study.pooled_rounds, study.pooled)),
        "LocalOnly": LocalOnly(train),
        "FedAvg": FedAvg(train),
        "FedProx": FedProx(train, mu=0.01),
        "MOON": MOON(train, mu=1.0),
        "FedNP": ours,
        "FedNP, f = 0": without,
        "FedEP": Switch(FedAvg(train), FedEP(Identity(train, study.scale)), study.rounds // 2),
    }


def compared_on(
    study: Speech,
    chosen: dict[str, Method],
    options: Options,
    rounds: int,
    where: str,
    at: Callable[[int], Setting] | None = None,
) -> Comparison:
    """Some methods of a study, with the WER of the worst speaker; in the study's setting, unless another is given."""
    return compare(
        chosen, at or study.setting, seeds=options.seeds, out=Storage(options.out / where, checkpoint_every=20),
        title=TITLE, resume=options.resume, on_run=lambda method, seed: options.tell(f"{where}, {method}", seed),
        rounds=rounds, evaluate_every=min(study.every, rounds), engine=study.engine, measure=worst_speaker,
        progress=False,
    )  # fmt: skip


def run(options: Options) -> Comparison:
    """All methods for groups of speakers, and for single speakers; pooled training once."""
    start, rows = time.perf_counter(), list[Row]()
    study = QUICK if options.quick else Speech()
    for clients, suffix in CLIENTS.items():
        if options.quick and clients != study.clients:
            continue
        mine = replace(study, clients=clients)
        chosen = methods(mine)
        pooled = {"Pooled": chosen.pop("Pooled")}
        found = compared_on(mine, chosen, options, mine.rounds, clients).rows
        if clients == study.clients:
            rows += compared_on(mine, pooled, options, mine.pooled_rounds, "pooled").rows
        rows += [replace(row, metric=row.metric + suffix, paper=PAPER.get((row.method, row.metric))) for row in found]
    return finished(NAME, TITLE, TEXT + ABOUT, options, rows, [], start)


RECIPE = Recipe(NAME, TITLE, run, seeds=3)
