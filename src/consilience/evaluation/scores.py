"""Evaluation: a belief about the weights, turned into predictions and scored."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from consilience.core import text
from consilience.core.beliefs import Belief, Mixture, draws
from consilience.core.display import scores as in_words
from consilience.core.display import table
from consilience.core.errors import TaskError
from consilience.core.gaussian import Gaussian
from consilience.data.dataset import Dataset
from consilience.data.federation import Federation
from consilience.evaluation.samples import cells, image_samples, point_samples
from consilience.metrics import auroc, entropy, reliability
from consilience.metrics.generative import pixels
from consilience.tasks.adversarial import Adversarial
from consilience.tasks.likelihoods import Regression
from consilience.tasks.task import Task

ENTROPY_BINS, WEIGHT_BINS = 20, 30
MAX_TENSORS = 12  # whose weights are summarised one by one
EXAMPLES = 8  # weights that stand for all
SHOWN, GRID = 500, 60  # examples beside generated ones, at most; points of a map on a side
RANKED = 1_000_000  # weights, about, that the range of a histogram is taken from


@dataclass(frozen=True, eq=False)
class Entropies:
    """Predictive entropies in nats [N], which of the predictions are `right` [N], and the entropies of examples of
    another kind, if there are any. Entropies lie between 0 and log `classes`."""

    entropy: Tensor
    right: Tensor
    classes: int
    outside: Tensor | None = None

    def to_json(self) -> dict[str, Any]:
        """Histograms of right, wrong and outside predictions over the same bins, each with its mean; and as AUROC, how
        well entropy tells wrong from right, and outside from inside."""
        kinds = {"right": self.entropy[self.right], "wrong": self.entropy[~self.right]}
        if self.outside is not None:
            kinds["outside"] = self.outside
        edges = torch.linspace(0, math.log(max(self.classes, 2)), ENTROPY_BINS + 1, dtype=torch.float64)
        found: dict[str, Any] = {"edges": edges.tolist()}
        for name, values in kinds.items():
            fine = values[values.isfinite()]
            mean = fine.mean().item() if len(fine) else None
            found[name] = {"count": histogram(fine, edges), "mean": mean}
        inside = self.entropy[self.entropy.isfinite()]
        found["auroc"] = {"wrong": _auroc(kinds["right"], kinds["wrong"]), "outside": _auroc(inside, self.outside)}
        return found


@dataclass(frozen=True)
class Evaluation:
    """Scores of the point prediction and, where there is a posterior, of the posterior-averaged one; per client
    when the test data says who holds it. Entropies are of classification; `belief` is what predicted."""

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
    """What generators made, as the report draws it."""

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
        """As the report reads it."""

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


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """Of every example, in nats [N]: `entropy` H[E p] of the averaged prediction, and its two parts.

    `expected_entropy` E H[p] is the noise in the labels (aleatoric), `mutual_information` H[E p] − E H[p] the doubt
    about the weights (epistemic), which more data would remove: how much the draws disagree. For a regression E p is
    taken for a Gaussian in every output, whose standard deviation is `sd` [N, …]: √(noise² + the draws' variance).
    """

    entropy: Tensor
    expected_entropy: Tensor
    mutual_information: Tensor
    sd: Tensor | None = None


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


def predict(
    task: Task, belief: Belief, data: Dataset, index: Tensor, samples: int = 0, batch_size: int = 1000
) -> Tensor:
    """Predictive means for rows `index`: of the mean weights, averaged over `samples` draws of the posterior, or of an
    ensemble."""
    return _predict(task, belief, data, index, samples, batch_size)[0]


def _predict(
    task: Task, belief: Belief, data: Dataset, index: Tensor, samples: int = 0, batch_size: int = 1000
) -> tuple[Tensor, Tensor | None]:
    """The same with the variance over networks, where a likelihood can use it."""
    networks, means, spreads = draws(belief, samples), [], []
    for start in range(0, len(index), batch_size):
        x = data.inputs(index[start : start + batch_size].to(data.x.device), task.dtype)
        made = each(task, networks, x)
        means.append(networks.combine(made))
        if isinstance(task, Regression):
            spreads.append(_spread(belief, networks, made))
    return torch.cat(means), torch.cat(spreads) if spreads else None


def _spread(belief: Belief, networks: Mixture, made: Tensor) -> Tensor:
    """The variance of what networks predict, [M, N, …] to [N, …]; of draws, an unbiased estimate of the posterior's."""
    spread, drawn = networks.combine((made - networks.combine(made)).square()), len(made)
    return spread * drawn / (drawn - 1) if isinstance(belief, Gaussian) and drawn > 1 else spread


def each(task: Task, networks: Mixture, x: Tensor) -> Tensor:
    """What each of several networks predicts for inputs x, [M, N, …]."""
    x = x.to(task.device)
    return torch.stack([task.predict(theta, x) for theta in networks.theta])


def evaluate(
    task: Task,
    belief: Belief | Callable[[int], Belief],
    test: Dataset | Federation,
    samples: int = 10,
    outside: Dataset | None = None,
) -> Evaluation:
    """Score a belief on test data. For a Federation, `belief` may be a function of the client, and every client's
    examples are predicted by its own belief; the overall scores then pool all predictions. Examples of another kind,
    `outside`, are dealt to the clients in turn; their labels are not looked at."""
    if isinstance(task, Adversarial):
        return _judged(task, belief, test, samples)
    if outside is not None:
        check_unlabelled(task, outside)
    if isinstance(test, Dataset):
        parts, data, names = [torch.arange(len(test))], test, None
    else:
        parts, data = [test.indices(c) for c in range(len(test))], test.data
        names = [test.name(c) for c in range(len(test))]
    beliefs = [belief(c) if callable(belief) else belief for c in range(len(parts))]
    bayesian = all(isinstance(b, Gaussian) for b in beliefs)
    held = [(b, part) for b, part in zip(beliefs, parts, strict=True) if len(part)]
    point = [_predict(task, b, data, part) for b, part in held]
    averaged = [_predict(task, b, data, part, samples) for b, part in held if bayesian]
    truth = [data.targets(part.to(data.y.device), task.dtype).to(task.device) for part in parts if len(part)]
    clients: list[dict[str, Any]] = []
    if names is not None:
        named = [(name, len(part)) for name, part in zip(names, parts, strict=True) if len(part)]
        clients = [
            {"name": name, "examples": size, "metrics": task.scores(p, y, spread)}
            for (name, size), (p, spread), y in zip(named, point, truth, strict=True)
        ]
    everything = torch.cat(truth)

    def entropies(prediction: Tensor, draws: int) -> Entropies | None:
        if task.kind != "classification":
            return None
        theirs = None if outside is None else entropy(_dealt(task, beliefs, outside, draws))
        right = prediction.argmax(dim=1) == everything
        return Entropies(entropy(prediction), right, prediction.shape[1], theirs)

    whole, scores, bins = _score(task, point, everything)
    found = Evaluation(
        scores, None, clients, bins, None, entropies(whole, 0),
        outside=None if outside is None else outside.name, belief=type(beliefs[0]).__name__,
    )  # fmt: skip
    if not averaged:
        return found
    whole, scores, bins = _score(task, averaged, everything)
    return replace(found, marginal=scores, marginal_reliability=bins, marginal_entropy=entropies(whole, samples))


def generated(task: Adversarial, beliefs: Sequence[Belief], count: int, samples: int = 0, seed: int = 0) -> Tensor:
    """`count` examples of the generators of one or more beliefs, as many of each, in turn."""
    networks = torch.cat([draws(belief, samples).theta for belief in beliefs])
    each = -(-count // len(networks))
    made = [task.generate(theta, each, seed + number) for number, theta in enumerate(networks)]
    return torch.stack(made, 1).flatten(0, 1)[:count]


def _judged(
    task: Adversarial, belief: Belief | Callable[[int], Belief], test: Dataset | Federation, samples: int
) -> Evaluation:
    """What a task's judges say of examples like those of `test`; clients' own generators are judged together."""
    data = test if isinstance(test, Dataset) else test.data.subset(test.order.to(test.data.x.device))
    beliefs = [belief(c) for c in range(len(test))] if callable(belief) else [belief]
    count = max(64, *(judge.count for judge in task.judges), 0)

    def scores(samples: int) -> tuple[dict[str, float], Tensor]:
        made = generated(task, beliefs, count, samples)
        return {k: v for judge in task.judges for k, v in judge(made[: judge.count], data).items()}, made

    point, made = scores(0)
    marginal = scores(samples)[0] if samples and all(isinstance(b, Gaussian) for b in beliefs) else None
    shown = _shown(task, beliefs[0], data, made)
    return Evaluation(point, marginal, [], None, None, belief=type(beliefs[0]).__name__, samples=shown)


def _shown(task: Adversarial, belief: Belief, data: Dataset, made: Tensor) -> dict[str, Any] | None:
    """Some of what was made beside real examples: images, or points in the plane with the discriminator's scores."""
    some = torch.linspace(0, len(data) - 1, min(SHOWN, len(data))).long()
    real = data.inputs(some.to(data.x.device), task.dtype)
    if data.scale is not None and made.dim() == 4 and made.shape[1] in (1, 3):
        brightest = data.x.max().item()  # 255, but for digits of fewer shades
        return image_samples(*((pixels(x.cpu(), data.to("cpu")) / brightest).clamp(0, 1) for x in (made, real)))
    if made.shape[1:] != (2,):
        return None
    low, high = real.min(0).values, real.max(0).values
    room = 0.2 * (high - low)
    low, high = low - room, high + room
    box = low.tolist(), high.tolist()
    scores = task.predict(draws(belief, 0).theta[0], cells(*box, GRID).to(task.device, task.dtype))
    return point_samples(made.cpu(), real.cpu(), *box, scores.view(GRID, GRID).cpu())


def _dealt(task: Task, beliefs: list[Belief], data: Dataset, samples: int) -> Tensor:
    """Predictions of examples that are nobody's: belief k of K has the examples k, k + K, k + 2K, …"""
    turns = [torch.arange(k, len(data), len(beliefs)) for k in range(len(beliefs))]
    dealt = zip(beliefs, turns, strict=True)
    return torch.cat([predict(task, belief, data, turn, samples) for belief, turn in dealt if len(turn)])


def marginals(task: Task, q: Gaussian) -> dict[str, Any] | None:
    """What a posterior N(m, Σ) says of single weights, in a few numbers: histograms of log₁₀ sd and of log₁₀ |m|/sd,
    over all weights and by parameter; the share of weights with |m| > 2 sd, whose sign is known; and some weights.
    None if hardly anything of it is finite."""
    mean, sd = q.mean.detach().cpu(), q.variance.detach().cpu().sqrt()
    if mean.dim() != 1 or not bool((mean.isfinite() & sd.isfinite() & (sd > 0)).any()):
        return None
    ratio = mean.abs() / sd
    columns = {"sd": sd.log10(), "ratio": ratio.clamp_min(1e-12).log10()}
    edges = {name: _edges(values) for name, values in columns.items()}

    def counts(part: slice) -> dict[str, list[int]]:
        return {name: histogram(values[part], edges[name]) for name, values in columns.items()}

    places = _places(task) if len(mean) == task.size else []
    largest = sorted(places, key=lambda place: place[1].stop - place[1].start, reverse=True)[:MAX_TENSORS]
    shown = [
        {"name": name, "shape": list(shape), **counts(part)} for name, part, shape in places
        if any(part == kept for _, kept, _ in largest)
    ]  # fmt: skip
    steps = max(1, min(EXAMPLES, len(mean)) - 1)
    chosen = sorted({round(i * (len(mean) - 1) / steps) for i in range(steps + 1)})
    return {
        "weights": len(mean),
        "known": (ratio > 2).double().mean().item(),
        "edges": {name: found.tolist() for name, found in edges.items()},
        "all": counts(slice(None)),
        "tensors": shown,
        "of_tensors": len(places),
        "examples": [{"name": _weight(places, i), "mean": mean[i].item(), "sd": sd[i].item()} for i in chosen],
    }


def _places(task: Task) -> list[tuple[str, slice, torch.Size]]:
    """Every parameter's name, place in the flat vector, and shape."""
    start, found = task.slice().start, []
    for name, shape in zip(task.names, task.shapes, strict=True):
        found.append((name, slice(start, start + shape.numel()), shape))
        start += shape.numel()
    return found


def _weight(places: list[tuple[str, slice, torch.Size]], index: int) -> str:
    """One weight's name: 0.weight[3, 7]."""
    for name, part, shape in places:
        if part.start <= index < part.stop:
            at = torch.unravel_index(torch.tensor(index - part.start), shape) if shape else ()
            return f"{name}[{', '.join(str(int(i)) for i in at)}]" if shape else name
    return f"weight {index}"


def _edges(values: Tensor) -> Tensor:
    """Bins for all but the strangest values, which go into the first and the last one."""
    fine = values[values.isfinite()]
    some = fine[:: math.ceil(len(fine) / RANKED)].double()
    low, high = (float(end) for end in some.quantile(torch.tensor([0.002, 0.998], dtype=torch.float64)))
    room = 0.5 if high - low < 0.1 else 0.02 * (high - low)
    return torch.linspace(low - room, high + room, WEIGHT_BINS + 1, dtype=torch.float64)


def histogram(values: Tensor, edges: Tensor) -> list[int]:
    """How many of the finite values lie in each bin; those beyond the ends count in the outermost ones."""
    fine = values[values.isfinite()].cpu().double()
    index = torch.bucketize(fine, edges[1:-1].contiguous(), right=True)
    counts: list[int] = torch.bincount(index, minlength=len(edges) - 1).tolist()
    return counts


def _auroc(inside: Tensor, outside: Tensor | None) -> float | None:
    """AUROC of what is finite; None where one side has nothing."""
    if outside is None:
        return None
    ours, theirs = inside[inside.isfinite()], outside[outside.isfinite()]
    return auroc(ours, theirs) if len(ours) and len(theirs) else None


def check_unlabelled(task: Task, data: Dataset, *kinds: str) -> None:
    """Refuse data whose predictive entropy cannot be had, and tasks of other kinds than classification and `kinds`."""
    if task.kind not in ("classification", *kinds):
        known = " and ".join(("classification", *kinds))
        raise TaskError(f"predictive entropy is defined for {known} here, but the task is {task.kind}")
    task.check(data, targets=False)


def uncertainty(task: Task, belief: Belief, data: Dataset, samples: int = 10, batch_size: int = 1000) -> Uncertainty:
    """How uncertain a belief is about every example, over `samples` draws of the posterior or an ensemble's networks.
    Labels are not looked at. Of one network alone the mutual information is zero."""
    check_unlabelled(task, data, "regression")
    if isinstance(task, Regression):
        return _of_regression(task, _predict(task, belief, data, torch.arange(len(data)), samples, batch_size)[1])
    networks = draws(belief, samples)
    share = networks.weights.double().mean(1, keepdim=True)
    share = share / share.sum()
    total, expected = [], []
    for start in range(0, len(data), batch_size):
        index = torch.arange(start, min(start + batch_size, len(data)), device=data.x.device)
        # The difference of two close entropies: in float32 it would be rounding where the networks agree.
        probs = each(task, networks, data.inputs(index, task.dtype)).double()
        total.append(entropy(networks.combine(probs)))
        expected.append((entropy(probs) * share).sum(0))
    whole, noise = torch.cat(total), torch.cat(expected)
    return Uncertainty(whole, noise, (whole - noise).clamp_min(0))


def _of_regression(task: Regression, spread: Tensor | None) -> Uncertainty:
    """½ ln 2πe σ² of every output's Gaussian, with and without what the networks' predictions vary."""
    assert spread is not None
    noise = torch.full_like(spread, task.noise**2, dtype=torch.float64)
    total, alone = ((2 * math.pi * math.e * v).log().flatten(1).sum(1) / 2 for v in (noise + spread, noise))
    return Uncertainty(total, alone, total - alone, (noise + spread).sqrt().to(task.dtype))


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


def _score(
    task: Task, parts: list[tuple[Tensor, Tensor | None]], y: Tensor
) -> tuple[Tensor, dict[str, float], dict[str, Any] | None]:
    """All clients' predictions as one, their scores, and reliability bins."""
    prediction, spreads = torch.cat([mean for mean, _ in parts]), [spread for _, spread in parts if spread is not None]
    bins = asdict(reliability(prediction, y)) if task.kind == "classification" else None
    return prediction, task.scores(prediction, y, torch.cat(spreads) if spreads else None), bins
