"""Ranks: the processes that share a run. The simulator has one."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from consilience.core.records import Tree
from consilience.engines.work import Share

T = TypeVar("T")


class Ranks(ABC):
    """The processes that compute a round together. All run the same code and hold the same server; rank 0 alone writes.
    All ranks call every method, in the same order."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @abstractmethod
    def __str__(self) -> str:
        """The engine's name."""

    @abstractmethod
    def merge(self, work: Callable[[], Share], server: Tree, additive: bool) -> Share:
        """Do this rank's work; every rank gets all shares together. The clients' new states stay with the rank that
        computed them. A failure in one rank is raised in all. All ranks must hold the same server."""

    def deal(self, ids: Tensor, sizes: Tensor) -> list[slice | Tensor]:
        """The places in `ids` of the clients that each rank computes, in their order."""
        return [slice(None)]

    @abstractmethod
    def led(self, work: Callable[[], T]) -> T:
        """The result (plain data) of work that rank 0 does for all. A failure there is raised in all ranks."""

    @abstractmethod
    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any rank."""

    def in_turn(self, work: Callable[[], T]) -> T:
        """Work that rank 0 does first and then, if that succeeded, all others."""
        done: list[T] = []
        self.led(lambda: done.append(work()))
        return done[0] if done else work()


class Alone(Ranks):
    """One process alone."""

    def __str__(self) -> str:
        return "simulator"

    def merge(self, work: Callable[[], Share], server: Tree, additive: bool) -> Share:
        return work()

    def led(self, work: Callable[[], T]) -> T:
        return work()

    def any(self, flag: bool) -> bool:
        return flag


ALONE = Alone()
