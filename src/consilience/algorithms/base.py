"""What an algorithm is: frozen hyperparameters and a few pure functions, both halves side by side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, is_dataclass
from typing import Any, ClassVar, TypeVar, dataclass_transform

from torch import Tensor

from consilience.core.beliefs import Belief
from consilience.core.checks import check_types
from consilience.core.records import Tree
from consilience.data.cohort import Cohort, Info
from consilience.data.federation import Federation
from consilience.tasks.task import Task

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def algorithm(cls: type[T]) -> type[T]:
    """Make a class with hyperparameters a frozen dataclass that checks the types of its arguments. Its first two
    arguments may be given by position; all others, and those of subclasses, by name."""
    inherited = is_dataclass(cls)
    if not inherited:
        hints = list(vars(cls).get("__annotations__", {}).items())
        own = [index for index, (_, hint) in enumerate(hints) if "ClassVar" not in str(hint)]
        if len(own) > 2:
            hints.insert(own[2], ("_", KW_ONLY))
        cls.__annotations__ = dict(hints)
    if (own_check := vars(cls).get("__post_init__")) or not inherited:

        def checked(self: Any) -> None:
            check_types(self)
            if own_check:
                own_check(self)

        cls.__post_init__ = checked  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=inherited)(cls)


class Algorithm(ABC):
    """Client and server halves of a method. Every function is pure; states are records.

    `local` is written for a cohort: leaves of `state`, of the update and of an `Addressed` message's `own` have a
    leading client axis K. The engine sums updates over clients (`additive`) or, for methods that must see them one
    by one, hands them to `fuse` stacked in the order of client ids. `task` is what `adapt` returned.
    """

    additive: ClassVar[bool] = True
    alone: ClassVar[bool] = False
    """Whether clients do not hear of each other: then a test is theirs, and not the server's."""

    @property
    def name(self) -> str:
        """As spelt in papers' tables."""
        return type(self).__name__

    def adapt(self, task: Task, seed: int) -> Task:
        """The task that this method trains. Append networks here with `task.extend`; draw their weights inside
        `keys.seeded(seed, purpose="networks")`, so that every engine and every site of a run gets the same ones."""
        return task

    def arrange(self, federation: Federation) -> Federation:
        """The federation that this method sees; only references that no real federation could run change it."""
        return federation

    @abstractmethod
    def start(self, task: Any, info: Info) -> Tree:
        """The server's state before the first round."""

    def client(self, task: Any, info: Info, n: Tensor) -> Tree:
        """Clients' states before they first take part, for n [K, 1] examples; None for a stateless method."""
        return None

    def message(self, server: Tree, ids: Tensor) -> Tree:
        """What the clients `ids` are told: a record, or `Addressed(shared, own)`."""
        return server

    @abstractmethod
    def local(self, task: Any, message: Any, state: Any, cohort: Cohort) -> tuple[Tree, Tree]:
        """A cohort's work: (update, new state)."""

    def follow(self, state: Any, update: Any) -> Tree:
        """A cohort's new states, as anyone can tell who saw the updates; None where only the clients themselves know.
        A server that can follow its clients need not hear of their states, and knows what it loses with one. What
        only a client knows and the server has no share in, such as a network of its own, stays as it was."""
        return None

    def swap(self, server: Any, old: Any, new: Any) -> Tree:
        """The server's state when one client (states without client axis) holds `new` in place of `old` all at once,
        as where its disk was lost. What the server has of the clients' states together stays true of them."""
        return server

    @abstractmethod
    def fuse(self, server: Any, update: Any) -> Tree:
        """The server's state after a round, from the sum of the updates (or all of them, if not additive)."""

    def advance(self, task: Any, server: Any, key: Tensor) -> Tree:
        """The server's state after what it does on its own once a round's updates are fused, with nobody's data; `key`
        is its randomness."""
        return server

    @abstractmethod
    def posterior(self, server: Any) -> Belief:
        """What the server believes of the weights."""

    def network(self, task: Task, server: Any) -> Task:
        """The task whose weights `posterior` is about, if it is not the clients'."""
        return task

    def facts(self, server: Any) -> dict[str, float]:
        """Numbers about the server's state that are worth a place in every round's metrics."""
        return {}

    def audit(self, server: Any, states: Iterable[Any]) -> dict[str, float]:
        """What should always hold, measured on the server's state and all clients' (in groups): numbers for the
        metrics, or an error. Called after every round of a run with `debug`."""
        return {}

    def personal(self, server: Any, state: Any) -> Belief:
        """What one client (state without client axis) would use; the global belief unless a method says more."""
        return self.posterior(server)
