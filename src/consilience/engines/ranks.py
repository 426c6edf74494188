"""Ranks: the processes that share a run, of which the simulator has only one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from consilience.core.records import Tree
from consilience.engines.work import Share

T = TypeVar("T")


class Ranks(ABC):
    """Who computes a round together. All ranks run the same code and hold the same server; rank 0 alone writes. Every
    method is called by all of them, in the same order."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that writes and prints."""
        return self.rank == 0

    @abstractmethod
    def __str__(self) -> str:
        """The engine in a word or two."""

    @abstractmethod
    def merge(self, work: Callable[[], Share], server: Tree, additive: bool) -> Share:
        """Do this rank's work; everybody gets all shares together. What fails in one rank fails in all. The server's
        states must be the same."""

    @abstractmethod
    def led(self, work: Callable[[], T]) -> T:
        """Work that rank 0 does for all, with its result (plain data). What fails there fails everywhere."""

    @abstractmethod
    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""

    def in_turn(self, work: Callable[[], T]) -> T:
        """Work that rank 0 does first and then, if that went well, all others."""
        done: list[T] = []
        self.led(lambda: done.append(work()))
        return done[0] if done else work()


class Alone(Ranks):
    """One process does it all."""

    def __str__(self) -> str:
        return "simulator"

    def merge(self, work: Callable[[], Share], server: Tree, additive: bool) -> Share:
        """There is nothing to merge."""
        return work()

    def led(self, work: Callable[[], T]) -> T:
        """There is nobody to tell."""
        return work()

    def any(self, flag: bool) -> bool:
        """Nobody else is asked."""
        return flag


ALONE = Alone()
