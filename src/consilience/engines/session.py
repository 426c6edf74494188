"""The contract between the round loop and an engine."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.core import keys
from consilience.core.records import Tree
from consilience.data.federation import Federation
from consilience.engines.choice import Say, silent
from consilience.engines.plan import Plan
from consilience.engines.ranks import ALONE, Ranks
from consilience.engines.states import States
from consilience.engines.work import Share
from consilience.evaluation.calibration import Calibration
from consilience.evaluation.scores import Evaluation
from consilience.tasks.statistics import Sums
from consilience.tasks.task import Task


@dataclass(frozen=True)
class RoundResult:
    """A round's updates, the server state that its messages were made from, and the bytes sent to clients.

    `server` differs from the state that the round was called with where a client lost its own state, joined, or is
    forgotten: the session changed the client's part first."""

    share: Share
    server: Tree
    bytes_down: int


class Session(ABC):
    """The rounds of one algorithm: the prepared task, the clients, and the plan by which they are computed.

    The loop calls `keep` and `settle` once, in this order, and then `round` for every round."""

    federation: Federation
    cohort: int
    task: Task
    stops_softly = True
    """Whether Ctrl-C lets a round end. It must not where a round may wait for a client that has gone."""
    saves_aside = True
    """Whether a checkpoint may be written while rounds go on. It must not where clients drop states that it names."""

    @property
    def asks_clients(self) -> bool:
        """Whether clients score the model on their own data when the server has no test data."""
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Free the session's resources."""

    def keep(self, states: States) -> States:
        """The client states as this engine keeps them."""
        return states

    @abstractmethod
    def settle(self, server: Tree, states: States, ids: Tensor, round: int, say: Say = silent) -> Plan:
        """Choose the plan, and prepare the task and the workers for it. `ids` are the clients of `round`, the first.
        `say` is told what is waited for."""

    @abstractmethod
    def round(self, server: Tree, states: States, ids: Tensor, round: int) -> RoundResult:
        """Compute the clients `ids`, and commit the new states of those whose updates were accepted. At real sites
        clients may join first: then `federation` has them."""

    def cores_for_workers(self) -> AbstractContextManager[None]:
        """Open while this process computes a little between two rounds: it leaves the cores to workers, if it has
        any."""
        return nullcontext()

    def clients(self, algorithm: Algorithm, seed: int, round: int) -> Tensor:
        """The clients of a round: those whose turn it is, or drawn from (seed, round)."""
        chosen = algorithm.turn(round, self.cohort, len(self.federation))
        if chosen is not None:
            return chosen
        return keys.sample(keys.key(seed, purpose="cohort", round=round), len(self.federation), self.cohort)

    @abstractmethod
    def statistics(self, theta: Tensor) -> Sums | None:
        """The statistics of BatchNorm layers over all clients' examples, for the weights θ [P]; None if no client can
        be asked."""

    def evaluate(
        self,
        algorithm: Algorithm,
        server: Tree,
        states: States,
        statistics: Sums | None,
        calibration: Calibration | None,
    ) -> Evaluation | None:
        """The scores on data that clients hold out: of the server's belief, with these statistics of BatchNorm layers,
        or of the clients' own beliefs where they have some; and of prediction sets, if they are calibrated."""
        return None

    def calibrate(
        self, algorithm: Algorithm, server: Tree, states: States, statistics: Sums | None
    ) -> Calibration | None:
        """The calibration of prediction sets on examples that clients hold out for it; None if they hold none."""
        return None


class Opener(Protocol):
    """Makes sessions in this process."""

    def open(
        self,
        algorithm: Algorithm,
        task: Task,
        federation: Federation,
        *,
        seed: int,
        cohort: int,
        rounds: int,
        plan: Plan | None = None,
        ranks: Ranks = ALONE,
    ) -> Session:
        """A session for the rounds of one algorithm, which `ranks` share. A given `plan` is followed."""


class Engine(Protocol):
    """Where clients are computed: in this process, in several, or at the clients' own sites."""

    @property
    def precision(self) -> str:
        """float32, float64 or bf16."""

    @property
    def secure(self) -> bool:
        """Whether updates are hidden in their sums, or computed as if they were."""

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes and prints."""

    def started(self) -> AbstractContextManager[tuple[Opener, Ranks]]:
        """(what this process computes with, the processes that share the run), for the length of a run."""
