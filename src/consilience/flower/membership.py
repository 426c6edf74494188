"""Sites that join, leave and are forgotten while a run goes on.

The registry says who takes part, and `RemoteStates.parts` whose part is in the server's state. Before every round the
server makes the second agree with the first. Both are stored, so a kill at any instant loses nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from consilience.core import ConsilienceError, Tree, rows, to
from consilience.engines import fresh_states
from consilience.flower.audit import AuditLog
from consilience.flower.exchange import Exchange
from consilience.flower.messages import SiteInfo
from consilience.flower.registry import Registry, change_registry, form_of
from consilience.flower.states import RemoteStates
from consilience.flower.updates import most_examples

log = logging.getLogger("consilience")
KnownState = Callable[[Tree, RemoteStates, int], Tree]
"""A function of (server's state, states, client) that returns the client's state without client axis; an error where
only its site knows it."""


@dataclass
class Membership:
    """Changes of who takes part, before a round."""

    exchange: Exchange
    states: RemoteStates
    round: int

    def read(self) -> None:
        """Read the registry, which commands may have changed."""
        self.exchange.use(Registry.read(self.exchange.folder) or self.exchange.registry)

    def update(self, server: Tree, known_state: KnownState, leaving: set[int]) -> Tree:
        """The server's state after the changes. The clients that are `leaving` take their parts out themselves."""
        for name in self.exchange.coordinator.available(self.exchange.registry.invited):
            server = self._join(server, name, self.exchange.coordinator.online[name][1])
        for client, member in enumerate(self.exchange.registry.members):
            has_part = client < len(self.states.parts) and bool(self.states.parts[client])
            if member.status in ("active", "removed") and not has_part:
                server = self._admit(server, client)
            elif member.status in ("leaving", "forgotten") and has_part and client not in leaving:
                server = self._forget(server, client, known_state)
        return server

    def _join(self, server: Tree, name: str, info: SiteInfo) -> Tree:
        """The server's state with the part of an invited site, if the site can join."""
        registry = self.exchange.registry
        if (info.x, info.y) != (registry.x, registry.y):
            self._refuse(name, f"its examples are {form_of(info)}, and those of the run {form_of(registry)}")
            return server
        others = [member.examples for member in registry.members if member.status == "active"]
        most = self.exchange.coordinator.participation.max_examples or most_examples([*others, info.examples])
        examples = min(info.examples, most)

        def joined(stored: Registry) -> Registry:
            return stored.with_member(name, examples=examples, status="active", estimated=False)

        self.exchange.use(joined(registry))
        try:
            server = self._admit(server, self.exchange.registry.client(name))
        except ConsilienceError as error:
            self._refuse(name, str(error))
            return server
        self._change(joined)
        self._tell("joined", name, examples=examples)
        return server

    def _refuse(self, name: str, reason: str) -> None:
        """Withdraw the invitation of a site that cannot join."""
        self._change(lambda stored: stored.uninvited(name))
        self._tell("refused", name, reason=reason)

    def _admit(self, server: Tree, client: int) -> Tree:
        """The server's state with the part of a client that begins now."""
        exchange, one = self.exchange, torch.tensor([client])
        fresh = fresh_states(exchange.algorithm, exchange.task, exchange.federation, server, one, exchange.seed)
        if fresh is not None:
            server = exchange.algorithm.admit(server, to(rows(fresh, 0), exchange.task.device))
        self.states.admit(client, to(fresh, self.states.device), self.round)
        return server

    def _forget(self, server: Tree, client: int, known_state: KnownState) -> Tree:
        """The server's state without the part of a client, if the method can take it out."""
        name = self.exchange.federation.name(client)
        try:
            server = self.exchange.algorithm.forget(server, known_state(server, self.states, client))
        except ConsilienceError as error:
            self._change(lambda stored: stored.with_member(name, status="removed"))
            self._tell("not forgotten", name, reason=str(error))
            return server
        self.forgotten(client)
        return server

    def forgotten(self, client: int) -> None:
        """Record that a client's part is out of the server's state."""
        name = self.exchange.federation.name(client)
        estimated = self.exchange.registry.members[client].estimated
        self.states.remove(client)
        self._change(lambda stored: stored.with_member(name, status="forgotten"))
        self._tell("forgotten", name, how="by an estimate of its part" if estimated else "exactly")

    def _change(self, change: Callable[[Registry], Registry]) -> None:
        self.exchange.use(change_registry(self.exchange.folder, change))

    def _tell(self, event: str, name: str, **facts: Any) -> None:
        said = "".join(f", {key} {value}" for key, value in facts.items())
        log.warning("round %d: %r: %s%s", self.round, name, event, said)
        AuditLog(self.exchange.folder).write(event, site=name, round=self.round, **facts)
