"""The model, methods and table of scores of the recipe `personal-hospitals`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from consilience.algorithms import Algorithm, FedEP, PartialPooling
from consilience.data import Federation, heart_disease, partition
from consilience.engines import Simulator
from consilience.inference import Newton
from consilience.metrics import spread
from consilience.runs import Run, fit
from consilience.studies.comparison import Row
from consilience.tasks import likelihoods
from consilience.tasks.supervised import Binary

LOCAL, POOLED = "LocalOnly", "FedEP"
ONE, KINDS = "one width, ML", "weights and biases, ML"
ONE_PRIOR, KINDS_PRIOR = "one width, prior", "weights and biases, prior"
DRAWS = 200  # of a posterior, for predictions


def labelled(quick: bool) -> tuple[int, ...]:
    """Numbers of labelled patients that a hospital joins with."""
    return (20,) if quick else (5, 10, 20, 40)


def methods(quick: bool) -> dict[str, tuple[Algorithm, int]]:
    """Methods and their rounds; three of them at the small size. With its common mean fixed at 0, PartialPooling is
    every hospital alone."""
    widths: dict[str, Any] = {"infer": Newton(), "damping": 1.0, "prior": 1.0, "tau": 0.1**0.5}
    rounds = 15 if quick else 60
    alone = PartialPooling(Newton(), damping=1.0, prior=1e10, tau=1.0, parts="all", learn=False)
    found: dict[str, tuple[Algorithm, int]] = {
        POOLED: (FedEP(Newton(), damping=1.0, prior=1.0), 8),
        LOCAL: (alone, 3),
        ONE: (PartialPooling(**widths, parts="all", strength=0.0), rounds),
        KINDS: (PartialPooling(**widths, parts="kinds", strength=0.0), rounds),
        ONE_PRIOR: (PartialPooling(**widths, parts="all", strength=4.0), rounds),
        KINDS_PRIOR: (PartialPooling(**widths, parts="kinds", strength=4.0), rounds),
    }
    return {label: found[label] for label in (POOLED, LOCAL, ONE_PRIOR)} if quick else found


def hospitals() -> Federation:
    """A client for each hospital, with all its patients."""
    return partition.by_group(heart_disease(), "hospital")


def without(federation: Federation, name: str) -> Federation:
    """The other hospitals."""
    return Federation.from_silos({other: federation.client(other) for other in names(federation) if other != name})


def names(federation: Federation) -> list[str]:
    """The names of all clients."""
    return [federation.name(client) for client in range(len(federation))]


def learn(method: tuple[Algorithm, int], federation: Federation) -> Run:
    """Logistic regression from weights 0."""
    module = nn.Linear(federation.data.x.shape[1], 1)
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    engine = Simulator(device="cpu", precision="float64", chunk=4, workers=1, threads=1)
    return fit(method[0], Binary(module), federation, rounds=method[1], engine=engine, progress=False)


@dataclass
class Table:
    """Scores over seeds by (method, metric), and by (method, hospital, metric)."""

    scores: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    by_hospital: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)

    def add(self, method: str, found: dict[str, float], suffix: str = "", hospital: str | None = None) -> None:
        """Append a seed's scores."""
        for metric, value in found.items():
            if hospital is None:
                self.scores.setdefault((method, metric + suffix), []).append(value)
            else:
                self.by_hospital.setdefault((method, hospital, metric + suffix), []).append(value)

    def add_mean(self, method: str, found: list[dict[str, float]], suffix: str = "") -> None:
        """Append a seed's means over hospitals."""
        means = {metric: sum(one[metric] for one in found) / len(found) for metric in found[0]}
        self.add(method, means, suffix)

    def per_client(self) -> list[dict[str, Any]]:
        entries = []
        for (method, hospital, metric), values in self.by_hospital.items():
            mean, std = spread(values)
            entries.append({"method": method, "client": hospital, "metric": metric, "mean": mean, "std": std})
        return entries

    def wins(self) -> list[Row]:
        """The share of seeds in which a method has a lower NLL than FedEP, for every NLL of both."""
        rows = []
        for (method, metric), values in self.scores.items():
            versus = self.scores.get((POOLED, metric))
            if method != POOLED and versus is not None and (metric.startswith("nll") and "apart" not in metric):
                better = [a < b for a, b in zip(values, versus, strict=True)]
                rows.append(Row(method, f"wins, {metric}", sum(better) / len(better), None, len(better)))
        return rows


def scored(probs: Tensor, y: Tensor, *metrics: str) -> dict[str, float]:
    """Some scores of predictions [N, 2]."""
    found = likelihoods.Binary().scores(probs, y)
    return {metric: found[metric] for metric in metrics}
