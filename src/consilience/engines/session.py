"""What the loop needs of an engine, whoever computes and wherever: rounds of one algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.core.records import Tree
from consilience.data.federation import Federation
from consilience.engines.plan import Plan
from consilience.engines.ranks import ALONE, Ranks
from consilience.engines.states import States
from consilience.engines.work import Share
from consilience.evaluation.scores import Evaluation
from consilience.tasks.task import Task


class Session(ABC):
    """Everything that the rounds of one algorithm share: the prepared task, who the clients are, how many of them a
    round has, and the plan by which they are computed."""

    federation: Federation
    cohort: int
    task: Task
    stops_softly = True
    """Whether Ctrl-C lets a round come to its end. It must not where a round may wait for somebody who has gone."""
    saves_aside = True
    """Whether a checkpoint may be written while rounds go on. It must not where others drop states that none names."""

    @property
    def asks_clients(self) -> bool:
        """Whether clients score the model on data of their own, where the server has none to test on."""
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Give back what was taken."""

    @abstractmethod
    def settle(self, server: Tree, states: States, ids: Tensor, round: int) -> Plan:
        """Choose how to compute, once, before the first round."""

    @abstractmethod
    def round(self, server: Tree, states: States, ids: Tensor, round: int) -> tuple[Share, int]:
        """All of a round's clients: (their share, bytes sent down). Commits the accepted clients' new states."""

    def keep(self, states: States) -> States:
        """The clients' states as this engine keeps them."""
        return states

    def evaluate(self, algorithm: Algorithm, server: Tree) -> Evaluation | None:
        """How the clients themselves score what the server believes, on data that they hold out."""
        return None


class Opener(Protocol):
    """What computes, in this process."""

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
        """Make ready for the rounds of one algorithm, which `ranks` share. A `plan` from an earlier session is
        followed, not chosen."""


class Engine(Protocol):
    """Where clients are computed: in this process, in many, or at the clients' own."""

    @property
    def precision(self) -> str:
        """float32, float64 or bf16."""

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes and prints."""

    def started(self) -> AbstractContextManager[tuple[Opener, Ranks]]:
        """(what this process computes with, who computes with it), for as long as a run takes."""
