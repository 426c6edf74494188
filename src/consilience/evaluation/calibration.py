"""Calibration of prediction sets: they contain the truth with a given probability, whether the belief is right or not.

This is split conformal prediction for clients that differ. Clients score examples that no training has seen; a score is
large for a target that surprises the belief. A set has all targets whose scores do not exceed a quantile of these
scores. Scores are counted in bins with public edges, so the counts of clients add up. A score is rounded up to the edge
of its bin, which keeps the guarantee exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from consilience.core import Belief, DataError, record
from consilience.core.checks import check_type
from consilience.core.records import static, to
from consilience.core.text import plural
from consilience.data import Dataset, Federation
from consilience.evaluation.predictions import SAMPLES, Inputs, predict_with_variance, unlabelled
from consilience.evaluation.sets import (
    OF_CLASSES,
    OF_NUMBERS,
    Classes,
    Intervals,
    LabelSets,
    Numbers,
    Threshold,
    check_score,
    predicted,
)
from consilience.tasks import Task

LEVEL = 0.9  # the coverage that reports show
OWN = 50  # a client with as many examples gets a threshold of its own: its coverage varies by about 0.04
ROUNDING = 1e-9
EDGES = {
    **dict.fromkeys(OF_CLASSES, torch.linspace(0, 1, 1001, dtype=torch.float64)[1:]),
    OF_NUMBERS: torch.logspace(-4, 6, 2001, dtype=torch.float64),
}


@record
class Calibration:
    """The scores of calibration examples, counted by bins: of all clients together [B + 1], and of each client in
    `names` [K, B + 1], which have at least `OWN` examples or are alone. The last bin lies beyond all edges. `clients`
    [1] is the number of clients with scores. `score` is "lac", "aps" or "residual". Predictions average over `samples`
    draws of a posterior, here and in the sets."""

    counts: Tensor
    clients: Tensor
    own: Tensor
    names: tuple[str, ...] = static()
    score: str = static()
    samples: int = static()

    @property
    def examples(self) -> int:
        """The number of calibration examples."""
        return int(self.counts.sum())

    def __repr__(self) -> str:
        of = f"{plural(self.examples, 'example')} of {plural(int(self.clients), 'client')}"
        return f"Calibration({self.score} scores of {of})"

    @property
    def of_newcomer(self) -> bool:
        """Whether the examples are a Dataset, predicted as those of a new client."""
        return int(self.clients) == 1 and not self.names

    @property
    def shared(self) -> Calibration:
        """Without the counts of single clients."""
        return replace(self, own=self.own[:0], names=())

    def with_own(self, name: str, counts: Tensor) -> Calibration:
        """With the counts of one client [B + 1], and of no other."""
        return replace(self, own=counts.unsqueeze(0), names=(name,)) if int(counts.sum()) >= OWN else self.shared

    def threshold(self, coverage: float = LEVEL, client: str | None = None) -> Threshold:
        """The threshold of sets with this coverage at a client: its own if it has one, otherwise that of all clients
        together. An error if there are too few examples."""
        check_type("coverage", coverage, float)
        if not 0 < coverage < 1:
            raise DataError(f"coverage is a probability between 0 and 1, got {coverage}")
        least, edges = f"at least {coverage:g} of the examples", EDGES[self.score]
        own = self.own[self.names.index(client)] if client in self.names else None
        if own is not None and int(own.sum()) >= _needed(1, coverage):
            return Threshold(_quantile(own, 1, coverage, edges), coverage, f"{least} of {client!r} are covered")
        of = "of all clients together are covered; this holds for no single client, and for no new one"
        if self.of_newcomer:
            of = "from where the calibration examples come are covered; this holds for no other client"
        return Threshold(_quantile(self.counts, int(self.clients), coverage, edges), coverage, f"{least} {of}")


def _quantile(counts: Tensor, clients: int, coverage: float, edges: Tensor) -> float:
    """The edge of the bin of the r-th smallest score, with r = ⌈coverage · (N + K)⌉ for N scores of K clients.

    Every client adds 1, because the example to be predicted may be any client's. Then Σ λ_k P_k(y is covered) is at
    least `coverage`, with λ_k proportional to n_k + 1 (Lu et al., 2023)."""
    total = int(counts.sum())
    check_enough(total, clients, coverage)
    rank = math.ceil(coverage * (total + clients) - ROUNDING)
    place = int((counts.cumsum(0) < rank).sum())
    return float(edges[place]) if place < len(edges) else math.inf


def _needed(clients: int, coverage: float) -> int:
    """The smallest number of calibration examples with a threshold, as the rank may not exceed it."""
    return math.ceil(clients * coverage / (1 - coverage) - ROUNDING)


def check_enough(examples: int, clients: int, coverage: float) -> None:
    """Refuse too few calibration examples for a coverage: all targets would be in every set."""
    needed = _needed(clients, coverage)
    if examples < needed:
        raise DataError(
            f"sets of coverage {coverage:g} need at least {needed} calibration examples of "
            f"{plural(clients, 'client')}, and there are {examples}: hold more out, or ask for a lower coverage"
        )


def calibrate(
    task: Task,
    belief: Belief | Callable[[int], Belief],
    data: Dataset | Federation,
    *,
    score: str = "lac",
    samples: int = SAMPLES,
    batch_size: int | None = None,
) -> Calibration:
    """Count the scores of calibration examples, which must not have been used for training, tuning or early stopping.

    `belief` may be a function of the client, as in `evaluate`. `score` is "lac" or "aps" for classes; numbers have the
    score "residual"."""
    score = check_score(task, score)
    if isinstance(data, Dataset):
        return calibrate(
            task, belief, Federation.from_silos([data]), score=score, samples=samples, batch_size=batch_size
        ).shared
    each: dict[str, Tensor] = {}
    for k in range(len(data)):
        if len(data.indices(k)):
            mine = belief(k) if callable(belief) else belief
            own = data.client(k)
            each[data.name(k)] = count_scores(task, mine, own, score, samples=samples, batch_size=batch_size)
    if not each:
        raise DataError("there are no calibration examples: hold out a larger share")
    enough = {name: counts for name, counts in each.items() if int(counts.sum()) >= OWN or len(each) == 1}
    none = torch.zeros(0, len(EDGES[score]) + 1, dtype=torch.int64)
    total, own_counts = sum(each.values(), none.sum(0)), torch.stack([*enough.values()]) if enough else none
    return Calibration(total, torch.tensor([len(each)]), own_counts, tuple(enough), score, samples)


def count_scores(
    task: Task,
    belief: Belief,
    data: Dataset,
    score: str,
    *,
    samples: int = SAMPLES,
    batch_size: int | None = None,
) -> Tensor:
    """The counts [B + 1] of one client's scores."""
    edges = EDGES[score]
    made = _predict(task, belief, data, score, samples, batch_size)
    places = torch.bucketize(made.scores(_targets(task, data)).cpu(), edges)
    return torch.bincount(places, minlength=len(edges) + 1)


def prediction_sets(
    task: Task,
    belief: Belief,
    calibration: Calibration,
    x: Inputs | Dataset,
    *,
    coverage: float = LEVEL,
    client: str | None = None,
    classes: tuple[str, ...] = (),
    batch_size: int | None = None,
) -> LabelSets | Intervals:
    """The sets for inputs x, or for those of a data set, at a client or at a new one. `classes` are names of classes
    for inputs."""
    data = x if isinstance(x, Dataset) else unlabelled(x, classes)
    task.check(data, targets=False)
    threshold = calibration.threshold(coverage, client)
    made = _predict(task, belief, data, calibration.score, calibration.samples, batch_size)
    found = made.sets(threshold)
    return replace(found, classes=data.classes) if isinstance(found, LabelSets) else found


def score_sets(
    task: Task,
    belief: Belief,
    calibration: Calibration,
    data: Dataset,
    *,
    coverage: float = LEVEL,
    client: str | None = None,
    batch_size: int | None = None,
) -> dict[str, float]:
    """Coverage and mean size of the sets for test examples, and of naive sets that take the belief to be right. The
    means over clients, weighted by their examples, are those of all examples together."""
    made = _predict(task, belief, data, calibration.score, calibration.samples, batch_size)
    y, found = _targets(task, data), {}
    for name, sets in (
        ("", made.sets(calibration.threshold(coverage, client))),
        ("naive_", made.naive(coverage)),
    ):
        found[f"{name}coverage"] = float(sets.covers(y).double().mean())
        found[f"{name}{sets.size_name}"] = float(sets.sizes.double().mean())
    return found


def _predict(
    task: Task, belief: Belief, data: Dataset, score: str, samples: int, batch_size: int | None
) -> Classes | Numbers:
    """The draws of a posterior are the same for calibration and sets: with others, scores would not be exchangeable."""
    rows = torch.arange(len(data))
    made = predict_with_variance(task, belief, data, rows, samples=samples, batch_size=batch_size)
    return predicted(task, *made, score)


def _targets(task: Task, data: Dataset) -> Any:
    return to(data.targets(torch.arange(len(data), device=data.device), task.dtype), task.device)
