"""Switch: one method after another, such as FedEP after a FedAvg warm start."""

from dataclasses import dataclass

from consilience.algorithms.base import Algorithm
from consilience.core.checks import Count, check_types


@dataclass(frozen=True)
class Switch:
    """`first` for `at` rounds, `then` after that. The second method starts at the first one's mean: its server and
    every client's state are made as in a first round, with these weights as the initial ones, and it may take over the
    first one's optimiser memory. `fit` resolves it; engines see one method at a time."""

    first: Algorithm
    then: Algorithm
    at: Count

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def name(self) -> str:
        """The second method's name, as the final result is its own."""
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
