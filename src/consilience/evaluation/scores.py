"""Evaluation: the scores of a belief about the weights on test data."""

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from consilience.core import Belief, Gaussian, text
from consilience.core.display import scores as in_words
from consilience.core.display import table
from consilience.data import Dataset, Federation
from consilience.evaluation.predictions import predict, predict_with_variance
from consilience.evaluation.samples import generate, shown_samples
from consilience.evaluation.uncertainty import Entropies, check_unlabelled
from consilience.metrics import entropy, reliability
from consilience.tasks import Adversarial, Task


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
) -> Evaluation:
    """Score a belief on test data, with `samples` draws of a posterior.

    For a Federation, `belief` may be a function of the client: each client's examples are predicted by its own belief,
    and the overall scores pool all predictions.

    outside: Out-of-distribution examples, used to score uncertainty. Their labels are not used. If clients have their
        own beliefs, the examples are dealt to the clients in turn.
    batch_size: Examples that are predicted at once; by default at most 1000 with at most 64 MiB of inputs."""
    if isinstance(task, Adversarial):
        return _evaluate_generators(task, belief, test, samples)
    if outside is not None:
        check_unlabelled(task, outside)
    federation = test if isinstance(test, Federation) else None
    data = test.data if isinstance(test, Federation) else test
    parts = [torch.arange(len(data))]
    if federation is not None:
        parts = [federation.indices(c) for c in range(len(federation))]
    beliefs = [belief(c) if callable(belief) else belief for c in range(len(parts))]
    targets = {
        c: data.targets(part.to(data.y.device), task.dtype).to(task.device) for c, part in enumerate(parts) if len(part)
    }

    def predictions(samples: int) -> dict[int, tuple[Tensor, Tensor | None]]:
        how: dict[str, Any] = {"samples": samples, "batch_size": batch_size}
        return {c: predict_with_variance(task, beliefs[c], data, parts[c], **how) for c in targets}

    def overall(found: dict[int, tuple[Tensor, Tensor | None]], samples: int) -> tuple[Any, Any, Entropies | None]:
        theirs = None if outside is None else entropy(_predict_dealt(task, beliefs, outside, samples, batch_size))
        return _score(task, found.values(), torch.cat(list(targets.values())), theirs)

    found = predictions(0)
    scores, bins, entropies = overall(found, 0)
    clients: list[dict[str, Any]] = []
    if isinstance(test, Federation):
        for c, (mean, variance) in found.items():
            own = task.likelihood.scores(mean, targets[c], variance)
            clients.append({"name": test.name(c), "examples": len(parts[c]), "metrics": own})
    name = None if outside is None else outside.name
    point = Evaluation(scores, None, clients, bins, None, entropies, outside=name, belief=type(beliefs[0]).__name__)
    if not all(isinstance(belief, Gaussian) for belief in beliefs):
        return point
    scores, bins, entropies = overall(predictions(samples), samples)
    return replace(point, marginal=scores, marginal_reliability=bins, marginal_entropy=entropies)


def _score(
    task: Task, parts: Collection[tuple[Tensor, Tensor | None]], y: Tensor, outside: Tensor | None
) -> tuple[dict[str, float], dict[str, Any] | None, Entropies | None]:
    """Scores, reliability bins and entropies of all clients' predictions together."""
    prediction = torch.cat([mean for mean, _ in parts])
    variances = [variance for _, variance in parts if variance is not None]
    scores = task.likelihood.scores(prediction, y, torch.cat(variances) if variances else None)
    if task.kind != "classification":
        return scores, None, None
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
