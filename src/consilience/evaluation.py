"""Evaluation: a belief about the weights, turned into predictions and scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from consilience.beliefs import Belief, Mixture, draws
from consilience.data.dataset import Dataset
from consilience.data.federation import Federation
from consilience.errors import TaskError
from consilience.gaussian import Gaussian
from consilience.metrics import auroc, entropy, reliability
from consilience.task import Task


@dataclass(frozen=True)
class Evaluation:
    """Scores of the point prediction and, where there is a posterior, of the posterior-averaged one; per client
    when the test data says who holds it."""

    point: dict[str, float]
    marginal: dict[str, float] | None
    clients: list[dict[str, Any]]
    reliability: dict[str, Any] | None
    marginal_reliability: dict[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """As the report reads it."""
        marginal = None
        if self.marginal is not None:
            marginal = {"metrics": self.marginal, "reliability": self.marginal_reliability}
        point = {"metrics": self.point, "reliability": self.reliability}
        return {"point": point, "marginal": marginal, "clients": self.clients}


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """Of every example, in nats [N]: `entropy` H[E p] of the averaged prediction, and its two parts.

    `expected_entropy` E H[p] is the noise in the labels (aleatoric), `mutual_information` H[E p] − E H[p] the doubt
    about the weights (epistemic), which more data would remove: how much the draws disagree.
    """

    entropy: Tensor
    expected_entropy: Tensor
    mutual_information: Tensor


@dataclass(frozen=True)
class Detection:
    """How well uncertainty tells outside examples from inside ones, as AUROC: 1 is perfect, ½ is chance.

    `point` and `marginal` are of the predictive entropy, of the mean weights and averaged over the posterior, with
    the mean entropies in nats beside them. What needs a posterior is None without one.
    """

    point: float
    marginal: float | None
    mutual_information: float | None
    inside_entropy: float
    outside_entropy: float
    marginal_inside_entropy: float | None
    marginal_outside_entropy: float | None


def predict(task: Task, belief: Belief, data: Dataset, index: Tensor, samples: int = 0, batch: int = 1000) -> Tensor:
    """Predictive means for rows `index`: of the mean weights, averaged over `samples` draws of the posterior, or of an
    ensemble."""
    networks = draws(belief, samples)
    out = []
    for start in range(0, len(index), batch):
        x = data.inputs(index[start : start + batch].to(data.x.device), task.dtype)
        out.append(networks.combine(each(task, networks, x)))
    return torch.cat(out)


def each(task: Task, networks: Mixture, x: Tensor) -> Tensor:
    """What each of several networks predicts for inputs x, [M, N, …]."""
    x = x.to(task.device)
    return torch.stack([task.predict(theta, x) for theta in networks.theta])


def evaluate(
    task: Task,
    belief: Belief | Callable[[int], Belief],
    test: Dataset | Federation,
    samples: int = 10,
) -> Evaluation:
    """Score a belief on test data. For a Federation, `belief` may be a function of the client, and every client's
    examples are predicted by its own belief; the overall scores then pool all predictions."""
    if isinstance(test, Dataset):
        parts, data, names = [torch.arange(len(test))], test, None
    else:
        parts, data = [test.indices(c) for c in range(len(test))], test.data
        names = [test.name(c) for c in range(len(test))]
    beliefs = [belief(c) if callable(belief) else belief for c in range(len(parts))]
    bayesian = all(isinstance(b, Gaussian) for b in beliefs)
    point = [predict(task, b, data, part) for b, part in zip(beliefs, parts, strict=True) if len(part)]
    marginals = [
        predict(task, b, data, part, samples) for b, part in zip(beliefs, parts, strict=True) if bayesian and len(part)
    ]
    truth = [data.targets(part.to(data.y.device), task.dtype).to(task.device) for part in parts if len(part)]
    clients: list[dict[str, Any]] = []
    if names is not None:
        named = [(name, len(part)) for name, part in zip(names, parts, strict=True) if len(part)]
        clients = [
            {"name": name, "examples": size, "metrics": task.scores(p, y)}
            for (name, size), p, y in zip(named, point, truth, strict=True)
        ]
    everything = torch.cat(truth)
    scores, bins = _score(task, torch.cat(point), everything)
    marginal, marginal_bins = _score(task, torch.cat(marginals), everything) if marginals else (None, None)
    return Evaluation(scores, marginal, clients, bins, marginal_bins)


def uncertainty(task: Task, belief: Belief, data: Dataset, samples: int = 10, batch: int = 1000) -> Uncertainty:
    """How uncertain a belief is about every example, over `samples` draws of the posterior or an ensemble's networks.
    Labels are not looked at. Of one network alone the mutual information is zero."""
    if task.kind != "classification":
        raise TaskError(f"predictive entropy is defined for classification here, but the task is {task.kind}")
    task.check(replace(data, y=torch.zeros(len(data), dtype=torch.int64)))
    networks = draws(belief, samples)
    share = networks.weights.double().mean(1, keepdim=True)
    share = share / share.sum()
    total, expected = [], []
    for start in range(0, len(data), batch):
        index = torch.arange(start, min(start + batch, len(data)), device=data.x.device)
        # The difference of two close entropies: in float32 it would be rounding where the networks agree.
        probs = each(task, networks, data.inputs(index, task.dtype)).double()
        total.append(entropy(networks.combine(probs)))
        expected.append((entropy(probs) * share).sum(0))
    whole, noise = torch.cat(total), torch.cat(expected)
    return Uncertainty(whole, noise, (whole - noise).clamp_min(0))


def detect(task: Task, belief: Belief, inside: Dataset, outside: Dataset, samples: int = 10) -> Detection:
    """Is a belief less certain about examples of another kind? Labels of neither set are looked at."""
    ours, theirs = (uncertainty(task, belief, data, samples=0).entropy for data in (inside, outside))
    point, means = auroc(ours, theirs), (ours.mean().item(), theirs.mean().item())
    if not samples or not isinstance(belief, Gaussian):
        return Detection(point, None, None, *means, None, None)
    a, b = (uncertainty(task, belief, data, samples) for data in (inside, outside))
    return Detection(
        point,
        auroc(a.entropy, b.entropy),
        auroc(a.mutual_information, b.mutual_information),
        *means,
        a.entropy.mean().item(),
        b.entropy.mean().item(),
    )


def _score(task: Task, prediction: Tensor, y: Tensor) -> tuple[dict[str, float], dict[str, Any] | None]:
    bins = asdict(reliability(prediction, y)) if task.kind == "classification" else None
    return task.scores(prediction, y), bins
