"""Switch: one method after another, such as FedEP after a FedAvg warm start."""

from __future__ import annotations

from dataclasses import dataclass

from consilience.algorithms.base import Algorithm
from consilience.core.errors import ConfigError


@dataclass(frozen=True)
class Switch:
    """`first` for `at` rounds, `then` from there on. The second method starts at the first one's mean: its server and
    every client's state are made as in a first round, with these weights as the initial ones, and it may take over the
    first one's optimiser memory. `fit` resolves it; engines only ever see one method.
    """

    first: Algorithm
    then: Algorithm
    at: int

    def __post_init__(self) -> None:
        if self.at < 1:
            raise ConfigError(f"at is the last round of the first method and must be at least 1, got {self.at}")

    @property
    def name(self) -> str:
        """The second method's: that is what a table is about."""
        return self.then.name


Method = Algorithm | Switch


@dataclass(frozen=True)
class Phase:
    """The rounds up to `last` (None: to the end) belong to `algorithm`."""

    algorithm: Algorithm
    last: int | None


def phases(method: Method) -> tuple[Phase, ...]:
    """A method's phases, in order."""
    if isinstance(method, Switch):
        return Phase(method.first, method.at), Phase(method.then, None)
    return (Phase(method, None),)
