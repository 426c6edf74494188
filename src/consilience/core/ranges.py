"""Ranges of hyperparameters for tuning: `ranges: ClassVar[Ranges] = {"lr": Range(1e-3, 1.0)}`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from consilience.core.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """A number between `low` and `high`: log-uniform, or uniform with `log=False`."""

    low: float
    high: float
    log: bool = True

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.high < math.inf or (self.log and self.low <= 0):
            what = "0 < low < high" if self.log else "low < high"
            raise ConfigError(f"a range needs {what}, got {self.low} and {self.high}")

    def at(self, share: float) -> float:
        """The quantile: a `share` of all draws lie below it."""
        if self.log:
            return self.low * math.pow(self.high / self.low, share)
        return self.low + (self.high - self.low) * share


@dataclass(frozen=True)
class Choice:
    """One of a few values with equal probability: for whole numbers, flags, names."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigError("a choice needs values to choose from")

    def at(self, share: float) -> Any:
        """The value at a `share` of the way through the list."""
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]


# By field; "server.lr" is a field of the part `server` and takes precedence over the range that the part declares. None
# means that the field is not tuned.
Ranges = Mapping[str, Range | Choice | None]
