"""Wrapping: methods that hold another method and change the updates that its server receives."""

from typing import Any

from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.core import Belief, ConfigError, Tree
from consilience.data import Cohort, Federation, Info
from consilience.tasks.task import Task


class Wrapping(Algorithm):
    """Delegates to `method` unless a subclass overrides.

    The method's updates must add up. Its server must not hold the sum of its clients' states: clients would keep
    changes that the server never received."""

    method: Algorithm

    def __post_init__(self) -> None:
        kind, name = type(self).__name__, self.method.name
        if isinstance(self.method, Wrapping):
            raise ConfigError(f"{kind} cannot hold {name}: their guarantees do not hold together")
        if not self.method.additive:
            raise ConfigError(f"{kind} needs a method whose updates add up, but {name} takes them one by one")
        if type(self.method).swap is not Algorithm.swap:
            raise ConfigError(
                f"{kind} cannot hold {name}, whose server has the sum of its clients' states: "
                "clients would keep changes that the server never received"
            )

    @property
    def alone(self) -> bool:  # type: ignore[override]
        return self.method.alone

    @property
    def personalises(self) -> bool:
        return self.method.personalises

    @property
    def pools_partially(self) -> bool:
        return self.method.pools_partially

    def inner(self, server: Any) -> Tree:
        """The state of the method's own server."""
        return server

    def around(self, server: Any, inner: Tree) -> Tree:
        """The server with another state of the method's own."""
        return inner

    def adapt(self, task: Task, seed: int) -> Task:
        return self.method.adapt(task, seed)

    def arrange(self, federation: Federation) -> Federation:
        return self.method.arrange(federation)

    def start(self, task: Task, info: Info) -> Tree:
        return self.method.start(task, info)

    def client(self, task: Task, info: Info, n: Tensor) -> Tree:
        return self.method.client(task, info, n)

    def message(self, server: Any, ids: Tensor) -> Tree:
        return self.method.message(self.inner(server), ids)

    def local(self, task: Task, message: Any, state: Any, cohort: Cohort) -> tuple[Tree, Tree]:
        return self.method.local(task, message, state, cohort)

    def advance(self, task: Task, server: Any, key: Tensor) -> Tree:
        return self.around(server, self.method.advance(task, self.inner(server), key))

    def posterior(self, server: Any) -> Belief:
        return self.method.posterior(self.inner(server))

    def network(self, task: Task, server: Any) -> Task:
        return self.method.network(task, self.inner(server))

    def facts(self, server: Any) -> dict[str, float]:
        return self.method.facts(self.inner(server))

    def personal(self, server: Any, state: Any) -> Belief:
        return self.method.personal(self.inner(server), state)

    def newcomer(self, server: Any) -> Belief:
        return self.method.newcomer(self.inner(server))
