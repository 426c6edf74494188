"""What methods share that hold another one and change what its server hears."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.core.beliefs import Belief
from consilience.core.errors import ConfigError
from consilience.core.records import Tree
from consilience.data.cohort import Cohort, Info
from consilience.data.federation import Federation
from consilience.tasks.task import Task


class Wrapping(Algorithm):
    """Everything is the `method`'s own, but for what the kinds say of it. Its updates must add up, and its server must
    not hold the sum of what clients keep: they would keep what the server never heard."""

    method: Algorithm

    def __post_init__(self) -> None:
        kind, name = type(self).__name__, self.method.name
        if isinstance(self.method, Wrapping):
            raise ConfigError(f"{kind} cannot hold {name}: what the one promises would not be true of both together")
        if not self.method.additive:
            raise ConfigError(f"{kind} needs a method whose updates add up, and {name} takes them one by one")
        if type(self.method).swap is not Algorithm.swap:
            raise ConfigError(
                f"{kind} cannot hold {name}, whose server has the sum of what its clients keep: "
                "clients would keep what the server never heard of"
            )

    def inner(self, server: Any) -> Tree:
        """The state of the method's own server."""
        return server

    def around(self, server: Any, inner: Tree) -> Tree:
        """The server with another state of the method's own."""
        return inner

    def adapt(self, task: Task, seed: int) -> Task:
        """The method's."""
        return self.method.adapt(task, seed)

    def arrange(self, federation: Federation) -> Federation:
        """The method's."""
        return self.method.arrange(federation)

    def start(self, task: Task, info: Info) -> Tree:
        """The method's."""
        return self.method.start(task, info)

    def client(self, task: Task, info: Info, n: Tensor) -> Tree:
        """The method's."""
        return self.method.client(task, info, n)

    def message(self, server: Any, ids: Tensor) -> Tree:
        """The method's."""
        return self.method.message(self.inner(server), ids)

    def local(self, task: Task, message: Any, state: Any, cohort: Cohort) -> tuple[Tree, Tree]:
        """The method's."""
        return self.method.local(task, message, state, cohort)

    def advance(self, task: Task, server: Any, key: Tensor) -> Tree:
        """The method's."""
        return self.around(server, self.method.advance(task, self.inner(server), key))

    def posterior(self, server: Any) -> Belief:
        """The method's."""
        return self.method.posterior(self.inner(server))

    def network(self, task: Task, server: Any) -> Task:
        """The method's."""
        return self.method.network(task, self.inner(server))

    def facts(self, server: Any) -> dict[str, float]:
        """The method's."""
        return self.method.facts(self.inner(server))

    def personal(self, server: Any, state: Any) -> Belief:
        """The method's."""
        return self.method.personal(self.inner(server), state)
