"""Evaluation: the scores of a belief about the weights on test data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from consilience.evaluation.predictions import predict
from consilience.evaluation.samples import generate, shown_samples
from consilience.evaluation.tallies import Tallied, tallied
from consilience.evaluation.uncertainty import Entropies, check_unlabelled
from consilience.metrics import Metric, Metrics, as_metrics, entropy, reliability
from consilience.tasks import Adversarial, Supervised, Task
from consilience.tasks.likelihoods import Function, Predictions


@dataclass(frozen=True)
class Evaluation:
    """Scores of the point prediction and, for a posterior, of the posterior average; and of each client if the test
    data are a Federation. Entropies are of classification; `belief` is the type of the belief."""

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

    def __repr__(self) -> str:
        parts = [in_words(self.point), f"marginal {in_words(self.marginal)}" if self.marginal else ""]
        parts += [text.plural(len(self.clients), "client") if self.clients else ""]
        return f"Evaluation({'; '.join(filter(None, parts))})"

    def _repr_html_(self) -> str:
        metrics, caption = text.in_order([*self.point, *(self.marginal or {})]), ""
        rows = [("ensemble" if self.belief == "Mixture" else "point model", self.point)]
        rows += [("posterior average", self.marginal)] if self.marginal else []
        cells = [[name, *(text.number(scores.get(metric)) for metric in metrics)] for name, scores in rows]
        if self.clients:
            caption = f"{text.plural(len(self.clients), 'client')} in .clients"
        return table(["", *map(text.short, metrics)], cells, caption)

    def with_sets(self, scores: Sequence[tuple[int, dict[str, float]]]) -> Evaluation:
        """With the scores of prediction sets, (examples, scores) of each client. Sets use the posterior average, if
        there is one."""
        total = sum(n for n, _ in scores)
        means = {name: sum(n * found[name] for n, found in scores) / total for name in scores[0][1]}
        clients = [
            {**client, "metrics": {**client["metrics"], **found}}
            for client, (_, found) in zip(self.clients, scores, strict=bool(self.clients))
        ]
        if self.marginal is None:
            return replace(self, point={**self.point, **means}, clients=clients)
        return replace(self, marginal={**self.marginal, **means}, clients=clients)

    def to_json(self) -> dict[str, Any]:
        """The content of evaluation.json."""

        def part(scores: Any, bins: Any, entropies: Entropies | None) -> dict[str, Any]:
            return {"metrics": scores, "reliability": bins, "entropy": entropies and entropies.to_json()}

        marginal = None
        if self.marginal is not None:
            marginal = part(self.marginal, self.marginal_reliability, self.marginal_entropy)
        return {
            "belief": self.belief,
            "point": part(self.point, self.reliability, self.entropy),
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
) -> Evaluation:
    """Score a belief on test data, with `samples` draws of a posterior.

    For a Federation, `belief` may be a function of the client: each client's examples are predicted by its own belief,
    and the overall scores pool all predictions.

    outside: Out-of-distribution examples, used to score uncertainty. Their labels are not used. If clients have their
        own beliefs, the examples are dealt to the clients in turn.
    batch_size: Examples that are predicted at once; by default at most 1000 with at most 64 MiB of inputs.
    metrics: Scores of your own: functions of (prediction, y) by name, or a list of `Metric`.
    calibration: Of prediction sets, whose coverage and size are then scored for this `coverage`."""
    own = as_metrics(metrics)
    if isinstance(task, Adversarial):
        if own:
            raise TaskError("own metrics score predictions, and the task is adversarial: give the task judges instead")
        return _evaluate_generators(task, belief, test, samples)
    if outside is not None:
        check_unlabelled(task, outside)
    data = test.data if isinstance(test, Federation) else test
    parts = [torch.arange(len(data))]
    if isinstance(test, Federation):
        parts = [test.indices(c) for c in range(len(test))]
    beliefs = [belief(c) if callable(belief) else belief for c in range(len(parts))]
    filled = [c for c, part in enumerate(parts) if len(part)]

    def tallies(task: Task, samples: int) -> dict[int, Tallied]:
        return {c: tallied(task, beliefs[c], data, parts[c], own, samples, batch_size) for c in filled}

    def overall(found: dict[int, Tallied], samples: int) -> tuple[Any, Any, Entropies | None]:
        theirs = None if outside is None else entropy(_predict_dealt(task, beliefs, outside, samples, batch_size))
        return _score(reduce(add, found.values()), theirs)

    several = any(isinstance(belief, Mixture) for belief in beliefs)
    found = tallies(task.of_outputs if isinstance(task, Supervised) and not several else task, 0)
    scores, bins, entropies = overall(found, 0)
    clients: list[dict[str, Any]] = []
    if isinstance(test, Federation):
        clients = [
            {"name": test.name(c), "examples": len(parts[c]), "metrics": one.scores()} for c, one in found.items()
        ]
    name = None if outside is None else outside.name
    point = Evaluation(scores, None, clients, bins, None, entropies, outside=name, belief=type(beliefs[0]).__name__)
    if all(isinstance(belief, Gaussian) for belief in beliefs) and _averages(task, own):
        scores, bins, entropies = overall(tallies(task, samples), samples)
        point = replace(point, marginal=scores, marginal_reliability=bins, marginal_entropy=entropies)
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
