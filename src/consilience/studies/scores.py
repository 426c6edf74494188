"""Scores over seeds: means, costs, and paired differences between methods."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from consilience.core.errors import ConfigError
from consilience.evaluation.intervals import paired_difference
from consilience.metrics import MARGINAL, NO_OWN, Directions, direction, directions, rounds_to, spread
from consilience.runs.run import Run
from consilience.studies.comparison import Row

SAME = 1e-12  # of the largest difference: how much differences vary by rounding alone


def _spread(values: list[float]) -> tuple[float, float | None]:
    """Mean and standard deviation; no deviation if a score is undefined or infinite for some seed."""
    return spread(values) if all(map(math.isfinite, values)) else (sum(values) / len(values), None)


@dataclass
class Scores:
    """Every seed's scores, by (method, metric) and by (method, client, metric)."""

    paper: Mapping[tuple[str, str], float]
    by_metric: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    by_client: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    replicates: dict[tuple[str, str, str], list[Tensor]] = field(default_factory=dict)
    """Scores of bootstrap samples of each seed's test examples, by (method, client, metric)."""

    def add(self, run: Run, method: str, seed: int, measured: Mapping[str, float], target: float | None) -> None:
        """Add a run's scores and costs; `measured` has precedence over costs."""
        evaluation = run.evaluation
        assert evaluation is not None  # a setting has test data
        averaged = {f"{metric}{MARGINAL}": value for metric, value in (evaluation.marginal or {}).items()}
        found = {**evaluation.point, **averaged, **run.algorithm.facts(run.server), **measured}
        for metric, value in costs(run, target).items():
            found.setdefault(metric, value)
        for metric, value in found.items():
            self.by_metric.setdefault((method, metric), {})[seed] = value
        for client in evaluation.clients:
            for metric, value in client["metrics"].items():
                self.by_client.setdefault((method, client["name"], metric), []).append(value)
        for name, scores in evaluation.replicates.items():
            for metric, values in scores.items():
                self.replicates.setdefault((method, name, metric), []).append(values)

    def rows(self) -> list[Row]:
        """Means over seeds."""
        return [
            Row(method, metric, *_spread([*values.values()]), len(values), self.paper.get((method, metric)))
            for (method, metric), values in self.by_metric.items()
        ]

    def per_client(self) -> list[dict[str, Any]]:
        """Means over seeds at every client."""
        entries = []
        for (method, client, metric), values in self.by_client.items():
            mean, std = _spread(values)
            entries.append({"method": method, "client": client, "metric": metric, "mean": mean, "std": std})
        return entries

    def listed(self, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """All scores in the order of seeds, None where a run has none."""
        return [
            {"method": method, "metric": metric, "values": [values.get(seed) for seed in seeds]}
            for (method, metric), values in self.by_metric.items()
        ]

    def paired(self, methods: Sequence[str], own: Directions = NO_OWN) -> list[dict[str, Any]]:
        """The differences of every method to the first one, paired by seed, for every metric with a direction."""
        entries = []
        for (method, metric), values in self.by_metric.items():
            first = self.by_metric.get((methods[0], metric), {})
            pairs = [(values[seed], first[seed]) for seed in sorted(values.keys() & first.keys())]
            pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
            if method != methods[0] and direction(metric, own) and pairs:
                entries.append({"method": method, "versus": methods[0], "metric": metric, **paired_test(pairs)})
        return entries

    def at_clients(self, versus: str | None, level: float | None, own: Directions = NO_OWN) -> list[dict[str, Any]]:
        """The difference of every method to the method `versus` at each client, for every metric with a direction, with
        an interval from the same bootstrap samples of test examples for both."""
        entries = []
        for (method, client, metric), values in self.replicates.items():
            key = str(versus), client, metric
            if method == versus or level is None or key not in self.replicates or not direction(metric, own):
                continue
            pairs = zip(self.by_client[method, client, metric], self.by_client[key], strict=True)
            differences = [a - b for a, b in pairs]
            ends = paired_difference([*zip(values, self.replicates[key], strict=True)], level)
            if all(map(math.isfinite, differences)):
                low, high = ends or (None, None)
                entry = {"method": method, "versus": versus, "client": client, "metric": metric}
                entries.append({**entry, "difference": statistics.fmean(differences), "low": low, "high": high})
        return entries


def costs(run: Run, target: float | None = None) -> dict[str, float]:
    """Seconds of training and megabytes sent, up and down, over all rounds; with a `target`, also the first round whose
    accuracy (or else the first score for which higher is better) is at least `target`."""
    sent = sum(line["bytes_up"] + line["bytes_down"] for line in run.history)
    found = {"seconds": sum(line["seconds"] for line in run.history), "MB sent": sent / 1e6}
    scores = [(line["round"], line["eval"]) for line in run.history if "eval" in line]
    if target is None or not scores:
        return found
    own = directions(run.metrics)
    rising = [metric for metric in scores[-1][1] if direction(metric, own) > 0]
    if not rising:
        raise ConfigError(
            f"target needs a score for which higher is better, and there is none: {', '.join(scores[-1][1])}"
        )
    metric = "accuracy" if "accuracy" in rising else rising[0]
    reached = rounds_to([(number, values[metric]) for number, values in scores], target, window=1)
    return found if reached is None else {**found, f"rounds to {target:g}": float(reached)}


def paired_test(pairs: Sequence[tuple[float, float]], *, overlap: float = 0.0) -> dict[str, Any]:
    """The mean difference of pairs (a, b), Student's t, its 95 % interval and p; these are None for fewer than three
    pairs, or if all differences are equal.

    `overlap` is n_test / n_train if the pairs are random splits of one data set. Such splits share examples, and the
    variance of their mean is taken as s² (1/J + n_test/n_train) for J splits (Nadeau and Bengio, 2003)."""
    from scipy import stats  # not needed by most commands, and slow to import

    differences = [a - b for a, b in pairs]
    mean, n = statistics.fmean(differences), len(pairs)
    t = low = high = p = None
    if n >= 3 and max(differences) - min(differences) > SAME * max(map(abs, differences)):
        error = statistics.stdev(differences) * math.sqrt(1 / n + overlap)
        half = float(stats.t.ppf(0.975, n - 1)) * error
        t, low, high = mean / error, mean - half, mean + half
        p = 2 * float(stats.t.sf(abs(t), n - 1))
    return {"difference": mean, "t": t, "low": low, "high": high, "p": p, "n": n}
