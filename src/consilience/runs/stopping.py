"""Early stopping: the best round by a score on validation data. The history alone decides, so a resumed run decides the
same."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consilience.metrics import Directions, choose_score, direction

VALIDATION = "validation"  # the key of validation scores in a round's line


@dataclass(frozen=True)
class Stopping:
    """The score `monitor`, by default the first that decides such things, and how many evaluations without a better one
    end the run: none do if `patience` is None. Rounds up to `since` are of an earlier method, and do not count."""

    monitor: str | None
    patience: int | None
    since: int
    own: Directions

    def best(self, history: Sequence[Mapping[str, Any]], round: int | None = None) -> int | None:
        """The best round, or the best one up to `round`: the first with the best score. None if none has a score."""
        scored = [(value, at) for at, value in self._scores(history) if round is None or at <= round]
        finite = [(value, at) for value, at in scored if math.isfinite(value)]
        return max(finite, key=lambda pair: (pair[0], -pair[1]))[1] if finite else None

    def is_over(self, history: Sequence[Mapping[str, Any]]) -> bool:
        """Whether `patience` evaluations have passed since the best round."""
        best = self.best(history)
        if best is None or self.patience is None:
            return False
        return sum(at > best for at, _ in self._scores(history)) >= self.patience

    def _scores(self, history: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
        """(round, score) of each evaluation; more is better."""
        lines = [line for line in history if VALIDATION in line and line["round"] > self.since]
        if not lines:
            return []
        metric = choose_score(lines[0][VALIDATION], self.monitor, "monitor", self.own)
        way = direction(metric, self.own)
        return [(line["round"], way * line[VALIDATION][metric]) for line in lines]
