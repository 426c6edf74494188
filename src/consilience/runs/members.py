"""Clients that join a run after its end, or are forgotten."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from consilience.algorithms.base import Algorithm
from consilience.algorithms.shared.factors import Factors
from consilience.core import ConsilienceError, DataError, Tree, keys, rows, to
from consilience.core.checks import check_type
from consilience.data import Dataset, Federation
from consilience.engines import InMemory, Precision, Simulator, States, chunks, fresh_states
from consilience.tasks.statistics import needs_statistics
from consilience.tasks.task import Task

log = logging.getLogger("consilience")
AT_ONCE = 64  # clients whose states are copied together


@dataclass(frozen=True)
class Members:
    """The clients of a run with their states, and the server's state. `round` is the last round."""

    algorithm: Algorithm
    task: Task
    federation: Federation
    server: Tree
    states: States
    round: int
    seed: int

    def __post_init__(self) -> None:
        if not self.states.known:
            raise ConsilienceError(
                "the clients' states are at their sites: only a simulated run can change its clients"
            )
        if needs_statistics(self.task):
            raise ConsilienceError(
                "the statistics of BatchNorm layers were estimated for the old clients: make the task with "
                "batch_norm='averaged', or use replace_batchnorm(model)"
            )
        if self.federation.steps > 1:
            raise DataError("the clients of a stream cannot change: make a federation of one step")

    def without(self, client: int) -> Members:
        """The members without one client, whose part is removed from the server's state."""
        if len(self.federation) < 2:
            raise DataError(f"{self.federation.name(client)!r} is the only client: without it nothing is left")
        state = to(rows(self.states.gather(torch.tensor([client])), 0), self.task.device)
        others = [k for k in range(len(self.federation)) if k != client]
        return self._with(self._silos(others), self.algorithm.forget(self.server, state), others)

    def joined(self, name: str, data: Dataset) -> Members:
        """The members and a new client, which has a fresh state and has learned nothing yet."""
        check_type("name", name, str)
        self.task.check(data)
        before = list(range(len(self.federation)))
        silos = self._silos(before)
        if name in silos:
            raise DataError(f"there is a client {name!r} already: give the new one another name")
        if not len(data):
            raise DataError(f"{name!r} has no examples to learn from")
        more, new = self._with({**silos, name: data}, self.server, before), torch.tensor([len(before)])
        state = more.states.gather(new)
        more.states.commit(new, state, self.round)
        return replace(more, server=self.algorithm.admit(self.server, to(rows(state, 0), self.task.device)))

    def learned(self, clients: list[int], rounds: int) -> Members:
        """The members after further rounds of some clients. An error if none of their updates is accepted. `damping` is
        for clients that learn at the same time, so a client that learns alone has none."""
        server, ids, algorithm = self.server, torch.tensor(clients), self.algorithm
        if len(clients) == 1 and isinstance(algorithm, Factors):
            algorithm = replace(algorithm, damping=None)
        precision: Precision = "float64" if self.task.dtype == torch.float64 else "float32"
        engine = Simulator(self.task.device.type, chunk=len(ids), workers=1, compile=False, precision=precision)
        last = self.round + rounds
        with engine.open(
            algorithm, self.task, self.federation, seed=self.seed, cohort=len(ids), rounds=rounds
        ) as session:
            session.settle(server, self.states, ids, last)
            for number in range(self.round + 1, last + 1):
                share = session.round(server, self.states, ids, number).share
                for client, reason in share.rejected.items():
                    who = repr(self.federation.name(client))
                    if not share.accepted:
                        raise ConsilienceError(f"the update of {who} was rejected, and nothing is learned: {reason}")
                    log.warning("round %d: the update of client %s was rejected: %s", number, who, reason)
                key = keys.key(self.seed, purpose="server", round=number).to(session.task.device)
                server = algorithm.advance(session.task, algorithm.fuse(server, share.update), key)
        return replace(self, server=server, round=last)

    def _silos(self, clients: list[int]) -> dict[str, Dataset]:
        return {self.federation.name(k): self.federation.client(k) for k in clients}

    def _with(self, silos: dict[str, Dataset], server: Tree, old: list[int]) -> Members:
        """Members with the data of these silos, of which the first have the states of the `old` clients."""
        made = Federation.from_silos(silos, how=self.federation.how)
        federation = replace(made, data=replace(made.data, name=self.federation.data.name)).to(self.task.device)
        states = InMemory(
            lambda ids: fresh_states(self.algorithm, self.task, federation, server, ids, self.seed), self.states.device
        )
        ids, clients = torch.arange(len(old)), torch.tensor(old)
        for part in chunks(ids, AT_ONCE):
            states.commit(ids[part], self.states.gather(clients[part]), self.round)
        return replace(self, federation=federation, server=server, states=states)
