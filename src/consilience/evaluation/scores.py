"""Evaluation: the scores of a belief about the weights on test data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from consilience.core import Belief, Gaussian, Mixture, TaskError, text
from consilience.core.display import scores as in_words
from consilience.core.display import table
from consilience.data import Dataset, Federation
from consilience.evaluation.calibration import LEVEL, Calibration, score_sets
from consilience.evaluation.intervals import Replicates, Spread, spreads
from consilience.evaluation.predictions import predict
from consilience.evaluation.samples import generate, shown_samples
from consilience.evaluation.tallies import Tallied, tallied
from consilience.evaluation.uncertainty import Entropies, check_unlabelled
from consilience.metrics import (
    ClassMetric,
    Metric,
    Metrics,
    ScoreCounts,
    as_metrics,
    check_level,
    entropy,
    reliability,
    wilson,
)
from consilience.metrics.intervals import Bounds
from consilience.tasks import Adversarial, Supervised, Task
from consilience.tasks.likelihoods import Function, Predictions

NO_SPREAD = Spread({}, {}, {})


@dataclass(frozen=True)
class Evaluation:
    """Scores of the point prediction and, for a posterior, of the posterior average; and of each client if the test
    data are a Federation. Entropies are of classification; `belief` is the type of the belief. `intervals` are
    [low, high] by metric, of the confidence `level`; a client has its own."""

    point: dict[str, float]
    marginal: dict[str, float] | None
    clients: list[dict[str, Any]]
    reliability: dict[str, Any] | None
    marginal_reliability: dict[str, Any] | None
    entropy: Entropies | None = field(default=None, compare=False)
    marginal_entropy: Entropies | None = field(default=None, compare=False)
    outside: str | None = None
    belief: str = ""
    samples: dict[str, Any] | None = field(default=None, compare=False)
    """Generated examples, as the report draws them."""
    intervals: dict[str, Bounds] = field(default_factory=dict)
    marginal_intervals: dict[str, Bounds] = field(default_factory=dict)
    level: float | None = None
    majority: float | None = field(default=None, compare=False)
    """The accuracy of each client's most frequent class in training, where these data are known; a client has its own
    as "majority"."""
    counts: ScoreCounts | None = field(default=None, compare=False, repr=False)
    """Of two classes: the scores by bin and class, which sites send in place of the scores."""
    marginal_counts: ScoreCounts | None = field(default=None, compare=False, repr=False)
    tempered: dict[str, float] | None = None
    """Scores of the posterior average at the fitted `temperature`, beside `marginal`."""
    temperature: float | None = None
    replicates: dict[str, Replicates] = field(default_factory=dict, compare=False, repr=False)
    """Scores of bootstrap samples of each client's examples: the samples of two models are the same ones."""

    def __repr__(self) -> str:
        parts = [in_words(self.point), f"marginal {in_words(self.marginal)}" if self.marginal else ""]
        parts += [f"at temperature {self.temperature:.3g} {in_words(self.tempered)}" if self.tempered else ""]
        parts += [text.plural(len(self.clients), "client") if self.clients else ""]
        return f"Evaluation({'; '.join(filter(None, parts))})"

    def _repr_html_(self) -> str:
        metrics, caption = text.in_order([*self.point, *(self.marginal or {})]), ""
        rows = [("ensemble" if self.belief == "Mixture" else "point model", self.point, self.intervals)]
        rows += [("posterior average", self.marginal, self.marginal_intervals)] if self.marginal else []
        cells = [
            [name, *(text.with_interval(scores.get(metric), ends.get(metric)) for metric in metrics)]
            for name, scores, ends in rows
        ]
        if self.clients:
            caption = f"{text.plural(len(self.clients), 'client')} in .clients"
        return table(["", *map(text.short, metrics)], cells, caption)

    def with_sets(self, scores: Sequence[tuple[int, dict[str, float]]]) -> Evaluation:
        """With the scores of prediction sets, (examples, scores) of each client. Sets use the posterior average, if
        there is one."""
        total = sum(n for n, _ in scores)
        means = {name: sum(n * found[name] for n, found in scores) / total for name in scores[0][1]}
        clients = [
            {**client, "metrics": {**client["metrics"], **found}, **self._shares(n, found, client.get("intervals"))}
            for client, (n, found) in zip(self.clients, scores, strict=bool(self.clients))
        ]
        if self.marginal is None:
            ends = self._shares(total, means, self.intervals)
            return replace(self, point={**self.point, **means}, clients=clients, **ends)
        ends = self._shares(total, means, self.marginal_intervals, "marginal_intervals")
        return replace(self, marginal={**self.marginal, **means}, clients=clients, **ends)

    def _shares(
        self, examples: int, scores: dict[str, float], known: dict[str, Bounds] | None, name: str = "intervals"
    ) -> dict[str, Any]:
        """Intervals with those of coverages, under a name; nothing where there are none."""
        if self.level is None:
            return {}
        shares = {metric: share for metric, share in scores.items() if metric.endswith("coverage")}
        return {name: {**(known or {}), **{k: wilson(share, examples, self.level) for k, share in shares.items()}}}

    def to_json(self) -> dict[str, Any]:
        """The content of evaluation.json."""

        def part(scores: Any, bins: Any, entropies: Entropies | None, ends: Any) -> dict[str, Any]:
            found = {"metrics": scores, "reliability": bins, "entropy": entropies and entropies.to_json()}
            return {**found, "intervals": ends} if self.level is not None else found

        marginal = None
        if self.marginal is not None:
            marginal = part(self.marginal, self.marginal_reliability, self.marginal_entropy, self.marginal_intervals)
        tempered = {} if self.tempered is None else {"tempered": self.tempered, "temperature": self.temperature}
        return tempered | {
            "belief": self.belief,
            "level": self.level,
            "majority": self.majority,
            "point": part(self.point, self.reliability, self.entropy, self.intervals),
            "marginal": marginal,
            "outside": self.outside,
            "clients": self.clients,
            "samples": self.samples,
        }


def evaluate(
    task: Task,
    belief: Belief | Callable[[int], Belief],
    test: Dataset | Federation,
    *,
    samples: int = 10,
    outside: Dataset | None = None,
    batch_size: int | None = None,
    metrics: Metrics = (),
    calibration: Calibration | None = None,
    coverage: float = LEVEL,
    intervals: float | None = None,
    trained_on: Dataset | None = None,
) -> Evaluation:
    """Score a belief on test data, with `samples` draws of a posterior; without draws, only the mean weights.

    For a Federation, `belief` may be a function of the client: each client's examples are predicted by its own belief,
    and the overall scores pool all predictions.

    outside: Out-of-distribution examples, used to score uncertainty. Their labels are not used. If clients have their
        own beliefs, the examples are dealt to the clients in turn. They get the scale and shift of the training data
        `trained_on`, by default those of the test data.
    batch_size: Examples that are predicted at once; by default at most 1000 with at most 64 MiB of inputs.
    metrics: Further scores: functions of (prediction, y) by name, or a list of `Metric` and of names such as "auprc".
    calibration: Of prediction sets, whose coverage and size are then scored for this `coverage`.
    intervals: The confidence level of an interval for every score, such as 0.95."""
    own = as_metrics(metrics)
    check_level(intervals)
    if isinstance(task, Adversarial):
        if own:
            raise TaskError("own metrics score predictions, and the task is adversarial: give the task judges instead")
        if intervals is not None:
            raise TaskError("scores of generated samples have no intervals: leave intervals out")
        return _evaluate_generators(task, belief, test, samples)
    check_metrics(task, own)
    data = test.data if isinstance(test, Federation) else test
    if outside is not None:
        outside = outside.normalised_as(trained_on, data)
        check_unlabelled(task, outside)
    parts = [torch.arange(len(data))]
    if isinstance(test, Federation):
        parts = [test.indices(c) for c in range(len(test))]
    beliefs = [belief(c) if callable(belief) else belief for c in range(len(parts))]
    filled = [c for c, part in enumerate(parts) if len(part)]

    def tallies(task: Task, samples: int) -> dict[int, Tallied]:
        return {c: tallied(task, beliefs[c], data, parts[c], own, samples, batch_size) for c in filled}

    def overall(found: dict[int, Tallied], samples: int) -> tuple[Any, Any, Entropies | None, Spread]:
        theirs = None if outside is None else entropy(_predict_dealt(task, beliefs, outside, samples, batch_size))
        whole = reduce(add, found.values())
        return *_score(whole, theirs), NO_SPREAD if intervals is None else spreads(found, whole, intervals)

    several = any(isinstance(belief, Mixture) for belief in beliefs)
    found = tallies(task.of_outputs if isinstance(task, Supervised) and not several else task, 0)
    scores, bins, entropies, spread = overall(found, 0)
    clients, replicates = list[dict[str, Any]](), dict[str, Replicates]()
    if isinstance(test, Federation):
        for c, one in found.items():
            ends = {} if intervals is None else {"intervals": spread.clients[c]}
            clients.append({"name": test.name(c), "examples": len(parts[c]), "metrics": one.scores(), **ends})
        replicates = {test.name(c): one for c, one in spread.replicates.items()}
    point = Evaluation(
        scores, None, clients, bins, None, entropies, outside=None if outside is None else outside.name,
        belief="Mixture" if several else type(beliefs[0]).__name__, intervals=spread.overall, level=intervals,
        replicates=replicates,
        counts=_counts(found),
    )  # fmt: skip
    if samples and all(isinstance(belief, Gaussian) for belief in beliefs) and _averages(task, own):
        scores, bins, entropies, spread = overall(found := tallies(task, samples), samples)
        point = replace(point, marginal=scores, marginal_reliability=bins, marginal_entropy=entropies)
        point = replace(point, marginal_intervals=spread.overall, marginal_counts=_counts(found))
    if calibration is None:
        return point
    names = [test.name(c) for c in filled] if isinstance(test, Federation) else [None]
    how: dict[str, Any] = {"coverage": coverage, "batch_size": batch_size}
    return point.with_sets(
        [
            (len(parts[c]), score_sets(task, beliefs[c], calibration, data[parts[c]], client=name, **how))
            for c, name in zip(filled, names, strict=True)
        ]
    )


def check_metrics(task: Task, metrics: Sequence[Metric]) -> None:
    """Refuse metrics of classes for a task that does not predict probabilities of classes."""
    likelihood = task.likelihood if isinstance(task, Supervised) else None
    fits = likelihood is not None and likelihood.categorical and not likelihood.streams
    if not fits and (wrong := [metric.name for metric in metrics if isinstance(metric, ClassMetric)]):
        raise TaskError(
            f"{text.listing(wrong)} {'is' if len(wrong) == 1 else 'are'} defined for classes, and the task is "
            f"{task.kind}: leave {'it' if len(wrong) == 1 else 'them'} out, or pass a function of your own"
        )


def _averages(task: Task, own: Sequence[Metric]) -> bool:
    """Whether there are scores of predictions averaged over a posterior: with a plain loss, own metrics only."""
    if not isinstance(task.likelihood, Function):
        return True
    return task.likelihood.averages and bool(own)


def _score(found: Tallied, outside: Tensor | None) -> tuple[dict[str, float], dict[str, Any] | None, Entropies | None]:
    """Scores, reliability bins and entropies of all clients' predictions together."""
    scores, tally = found.scores(), found.tally
    if not isinstance(tally, Predictions) or not tally.of_classes:
        return scores, None, None
    prediction, y = tally.prediction, tally.y
    entropies = Entropies(entropy(prediction), prediction.argmax(dim=1) == y, prediction.shape[1], outside)
    return scores, asdict(reliability(prediction, y)), entropies


def _counts(found: Mapping[int, Tallied]) -> ScoreCounts | None:
    """The scores of all clients by bin and class, if there are two classes."""
    tally = reduce(add, found.values()).tally
    if not isinstance(tally, Predictions) or not tally.of_classes or tally.prediction.shape[1] != 2:
        return None
    return ScoreCounts.of(tally.prediction, tally.y)


def _predict_dealt(task: Task, beliefs: list[Belief], data: Dataset, samples: int, batch_size: int | None) -> Tensor:
    """Predictions of examples that belong to no client: belief k of K predicts the examples k, k + K, k + 2K, …"""
    turns = [torch.arange(k, len(data), len(beliefs)) for k in range(len(beliefs))]
    dealt = zip(beliefs, turns, strict=True)
    how: dict[str, Any] = {"samples": samples, "batch_size": batch_size}
    return torch.cat([predict(task, belief, data, turn, **how) for belief, turn in dealt if len(turn)])


def _evaluate_generators(
    task: Adversarial, belief: Belief | Callable[[int], Belief], test: Dataset | Federation, samples: int
) -> Evaluation:
    """The scores of a task's judges on generated examples; clients' own generators are scored together."""
    data = test if isinstance(test, Dataset) else test.data[test.order.to(test.data.device)]
    beliefs = [belief(c) for c in range(len(test))] if callable(belief) else [belief]
    count = max(64, *(judge.count for judge in task.judges), 0)

    def scores(made: Tensor) -> dict[str, float]:
        return {k: v for judge in task.judges for k, v in judge(made[: judge.count], data).items()}

    made, marginal = generate(task, beliefs, count), None
    if samples and all(isinstance(belief, Gaussian) for belief in beliefs):
        marginal = scores(generate(task, beliefs, count, samples=samples))
    shown = shown_samples(task, beliefs[0], data, made)
    return Evaluation(scores(made), marginal, [], None, None, belief=type(beliefs[0]).__name__, samples=shown)
