"""Speakers as clients: AN4's utterances, the acoustic model, and the sizes of both studies of speech."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from consilience.data import Dataset, Federation, SpecAugment, load, partition
from consilience.engines.simulator import Simulator
from consilience.models.acoustic import Cell, acoustic
from consilience.optim import Adam, Chain
from consilience.optim.schedules import Cosine
from consilience.recipes.base import seeded
from consilience.runs.run import Run
from consilience.studies import Setting
from consilience.tasks.supervised import CTC

WER = "wer"
WORST = f"{WER}, worst speaker"
Clients = Literal["groups", "speakers"]
CLIENTS: dict[Clients, str] = {"groups": "", "speakers": ", 74 clients"}
"""Who is a client, and what is added to the names of its metrics."""
TEXT = (
    "AN4: words, letters and digits of 74 speakers; the test set has nine others, so every model meets new speakers. "
    "Log-mel features with the mean and variance of a speaker removed, SpecAugment, an SRU network in both directions "
    "with CTC over characters, greedy decoding. WER and CER are error rates of words and characters; “worst speaker” "
    "is the highest WER of a test speaker. A transcript's confidence is the probability of its characters; ECE and "
    "Brier score it against whether the whole transcript is right, “marginal” for frames averaged over a posterior. "
)


@dataclass(frozen=True)
class Speech:
    """Sizes. `groups` is the number of clients if these are groups of speakers; `longest` limits the characters of an
    utterance, and `speakers` the number of speakers, for the small size; there `heard` tests on the training speakers.
    `scale` is the precision that an utterance adds to FedEP's posterior."""

    clients: Clients = "groups"
    groups: int = 16
    cell: Cell = "sru"
    hidden: int = 128
    layers: int = 3
    dropout: float = 0.1
    train: Adam = field(default_factory=lambda: Adam(lr=1e-3, batch_size=8, epochs=5))
    pooled: Adam = field(default_factory=lambda: Adam(lr=1e-3, batch_size=8, epochs=5))
    rounds: int = 45
    pooled_rounds: int = 9
    scale: float = 5.0
    longest: int | None = None
    speakers: int | None = None
    heard: bool = False
    every: int = 20
    engine: Simulator = field(default_factory=lambda: Simulator(compile=False))

    def data(self) -> tuple[Dataset, Dataset]:
        """Training and test utterances."""
        found = load("an4")
        train, test = self.few(found.train), self.few(found.test)
        return train, train if self.heard else test

    def few(self, data: Dataset) -> Dataset:
        """Utterances that are short enough, of the first speakers."""
        chosen = torch.ones(len(data), dtype=torch.bool)
        if self.longest is not None:
            chosen &= data.y.sizes <= self.longest
        if self.speakers is not None:
            chosen &= data.groups["speaker"] < self.speakers
        return data if bool(chosen.all()) else data[chosen.nonzero().flatten()]

    def federation(self, data: Dataset, seed: int) -> Federation:
        """A client for each speaker, or for each of `groups` random groups of speakers."""
        if self.clients == "speakers":
            return partition.by_group(data, "speaker", minimum=1)
        return speaker_groups(data, self.groups, seed)

    def task(self, data: Dataset, seed: int) -> CTC:
        """The acoustic model with the initial weights of a seed, for features as wide as the data's."""
        shape: dict[str, Any] = {"cell": self.cell, "hidden": self.hidden, "layers": self.layers}
        module = seeded(seed, lambda: acoustic(data.x.shape[1:], len(data.classes), dropout=self.dropout, **shape))
        return CTC(module, data.classes[1:], augment=SpecAugment())

    def setting(self, seed: int, change: Callable[[Dataset], Dataset] = lambda data: data) -> Setting:
        """The task, the clients and the test set, after a `change` of the features."""
        train, test = map(change, self.data())
        return Setting(self.task(train, seed), self.federation(train, seed), test)

    def chain(self, rounds: int, chain: Adam) -> Chain:
        """Adam whose step size falls to a twentieth along half a cosine."""
        return replace(chain, schedule=Cosine(unit="rounds", total=rounds, floor=0.05))


QUICK = Speech(
    groups=3, hidden=32, layers=1, dropout=0.0, train=Adam(lr=0.01, batch_size=4, epochs=8),
    pooled=Adam(lr=0.01, batch_size=4, epochs=8), rounds=3, pooled_rounds=3, longest=6, speakers=12, heard=True,
    every=1, engine=Simulator(device="cpu", chunk=4, workers=1, threads=1),
)  # fmt: skip


def speaker_groups(data: Dataset, clients: int, seed: int = 0) -> Federation:
    """Speakers at random into groups of one size, up to one: the clients."""
    present = sorted(set(data.groups["speaker"].tolist()))
    speaker = torch.searchsorted(torch.tensor(present), data.groups["speaker"])
    group = torch.randperm(len(present), generator=torch.Generator().manual_seed(seed)) % clients
    names = [f"group {number + 1}" for number in range(clients)]
    how = f"speakers into {clients} groups"
    return Federation.from_owner(data, group[speaker], names=names, clients=clients, how=how)


def worst_speaker(run: Run, at: Setting) -> dict[str, float]:
    """The highest word error rate of a test speaker; where clients are alone, that of an average client."""
    test = at.test
    assert isinstance(test, Dataset)
    speakers = test.groups["speaker"]
    rates = [
        run.evaluate(test[(speakers == speaker).nonzero().flatten()], samples=0).point[WER]
        for speaker in sorted(set(speakers.tolist()))
    ]
    return {WORST: max(rates)}
