"""Algorithm: frozen hyperparameters and a few pure functions, for clients and server."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, fields, is_dataclass
from typing import Any, ClassVar, TypeVar, dataclass_transform

from torch import Tensor

from consilience.core import Belief, ConsilienceError, Tree, check_types
from consilience.data import Cohort, Federation, Info
from consilience.tasks.task import Task

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def algorithm(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass that checks the types of its arguments. Its first two arguments, and those of its
    bases, may be given by position; all others by name."""
    hints = dict(vars(cls).get("__annotations__", {}))
    own = [name for name, hint in hints.items() if "ClassVar" not in str(hint)]
    by_position = [field.name for field in fields(cls) if not field.kw_only] if is_dataclass(cls) else own[:2]
    by_name = {name: hints.pop(name) for name in own if name not in by_position}
    cls.__annotations__ = {**hints, "_": KW_ONLY, **by_name}
    # A decorated base has checked the types already, unless this class overrides its check.
    own_check = vars(cls).get("__post_init__") if is_dataclass(cls) else getattr(cls, "__post_init__", None)

    def checked(self: Any) -> None:
        check_types(self)
        if own_check:
            own_check(self)

    if own_check or not is_dataclass(cls):
        cls.__post_init__ = checked  # type: ignore[attr-defined]
    return dataclass(frozen=True)(cls)


class Algorithm(ABC):
    """The client half and the server half of a method. Every function is pure; states are records.

    `local` is written for a cohort: leaves of `state`, of the update and of an `Addressed` message's `own` have a
    leading client axis K. The engine sums updates over clients; where `additive` is False it stacks them in the order
    of client ids and passes them all to `fuse`. `task` is the result of `adapt`."""

    additive: ClassVar[bool] = True
    by_gradients: ClassVar[bool] = False
    """Whether the method is only right for entries of θ that gradients have moved. Running averages are not."""
    alone: ClassVar[bool] = False
    """Whether clients share nothing. Then their own models are tested, not the server's."""
    private_state: ClassVar[bool] = False
    """Whether clients' states have parts that `follow` cannot tell."""

    @property
    def name(self) -> str:
        """The name in tables."""
        return type(self).__name__

    @property
    def personalises(self) -> bool:
        """Whether clients predict with beliefs of their own, by `personal`."""
        return type(self).personal is not Algorithm.personal

    @property
    def pools_partially(self) -> bool:
        """Whether the belief about a new client, by `newcomer`, is not the `posterior`."""
        return type(self).newcomer is not Algorithm.newcomer

    def adapt(self, task: Task, seed: int) -> Task:
        """The task that this method trains. Append networks here with `task.extend`; draw their weights inside
        `keys.seeded(seed, purpose="networks")`, so that every engine and every site of a run gets the same ones."""
        return task

    def arrange(self, federation: Federation) -> Federation:
        """The federation that this method trains on; only references that no real federation can run change it."""
        return federation

    def turn(self, round: int, cohort: int, clients: int) -> Tensor | None:
        """The numbers of a round's clients, ascending, where the method says in which order they take part; None where
        they are drawn at random."""
        return None

    @abstractmethod
    def start(self, task: Any, info: Info) -> Tree:
        """The server's state before the first round."""

    def client(self, task: Any, info: Info, n: Tensor) -> Tree:
        """The states of clients with n [K, 1] examples before they first take part; None for a stateless method."""
        return None

    def message(self, server: Tree, ids: Tensor) -> Tree:
        """The message to the clients `ids`: a record, or `Addressed(shared, own)`."""
        return server

    @abstractmethod
    def local(self, task: Any, message: Any, state: Any, cohort: Cohort) -> tuple[Tree, Tree]:
        """The work of a cohort: (update, new state)."""

    def follow(self, state: Any, update: Any) -> Tree:
        """New client states, computed from the updates alone; None if only the client can know them.

        With it a server keeps copies of its clients' states without receiving them. Parts of a state that only the
        client knows and the server does not use, such as a network of its own, stay unchanged in the copy."""
        return None

    def swap(self, server: Any, old: Any, new: Any) -> Tree:
        """The server's state after one client's state (without client axis) changed from `old` to `new`, as when its
        disk was lost. It keeps what the server holds about all clients' states together, such as their mean, true."""
        return server

    def measures(
        self, message: Any, state: Any, update: Any, *, n: Tensor, round_size: int, examples: int
    ) -> dict[str, Tensor]:
        """Numbers [K] about each client's update, by which the server judges it. `message`, `state` and `update` are
        those of `local`; `n` [K, 1], `round_size` and `examples` are those of its cohort."""
        return {}

    def refusals(self, server: Any, update: Any, measures: dict[str, Tensor]) -> dict[int, str]:
        """The clients whose updates the server refuses, by their rows in the `measures` of a whole round, and why.
        `update` is what `fuse` would get. The others are judged again without them, until none is refused. A refused
        client keeps the state that it had before the round."""
        return {}

    def objection(self, measures: dict[str, Tensor]) -> str:
        """Why a client withholds its own update, which has these `measures` [1]; empty if it sends it. Under secure
        aggregation only the client sees its update, so it does what `refusals` can do without other clients."""
        return ""

    def implausible(self, server: Any, update: Any) -> str:
        """Why the server drops a round, judged by the sum of its updates alone; empty if it does not."""
        return ""

    def estimate(self, server: Any, share: float) -> Tree:
        """The state (without client axis) of a client with this share of all examples, estimated from the server's
        state, for `swap` and `forget` where nobody else knows it; None if it cannot be estimated."""
        return None

    def farewell(self, state: Any) -> Tree:
        """The update by which clients with these states take their parts out of the server's state; None if no update
        can."""
        return None

    @abstractmethod
    def fuse(self, server: Any, update: Any) -> Tree:
        """The server's state after a round, from the sum of the updates (or from all of them, if not additive)."""

    def advance(self, task: Any, server: Any, key: Tensor) -> Tree:
        """The server's state after its own work at the end of a round, which uses no client's data. `key` seeds its
        randomness."""
        return server

    @abstractmethod
    def posterior(self, server: Any) -> Belief:
        """The server's belief about the weights."""

    def network(self, task: Task, server: Any) -> Task:
        """The task whose weights `posterior` is about, if it is not the clients' task."""
        return task

    def facts(self, server: Any) -> dict[str, float]:
        """Numbers about the server's state for every round's metrics."""
        return {}

    def audit(self, server: Any, states: Iterable[Any]) -> dict[str, float]:
        """Invariants measured on the server's state and all clients' states (in groups): numbers for the metrics, or an
        error. Called after every round of a run with `debug`."""
        return {}

    def personal(self, server: Any, state: Any) -> Belief:
        """One client's belief about the weights (state without client axis): the global one unless overridden."""
        return self.posterior(server)

    def newcomer(self, server: Any) -> Belief:
        """The belief about the weights of a client that never took part: the global one unless overridden."""
        return self.posterior(server)

    def admit(self, server: Any, state: Any) -> Tree:
        """The server's state after a client with this fresh state (without client axis) has joined."""
        raise ConsilienceError(
            f"a client cannot join a run of {self.name}, whose server has no separate part for each client: fit all "
            "clients anew, or use FedEP or PartialPooling"
        )

    def forget(self, server: Any, state: Any) -> Tree:
        """The server's state without the part that one client's state (without client axis) has in it."""
        raise ConsilienceError(
            f"{self.name} cannot forget a client, because its server has no separate part for each client: fit the "
            "other clients anew, or use FedEP or PartialPooling"
        )
