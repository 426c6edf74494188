"""One attempt at a round: training requests to the chosen clients, and their checked replies."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path

import torch
from flwr.app import RecordDict
from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.core import keys
from consilience.core.errors import RecordError
from consilience.core.records import Addressed, Tree, nbytes, pack, to, tree_map
from consilience.engines import Share, States, part_of, refused_clients, template_of
from consilience.flower.coordinator import Coordinator
from consilience.flower.folding import Folded, OneByOne, Spill, Updates
from consilience.flower.messages import (
    NO_STATE,
    SecurePart,
    Token,
    TrainReply,
    TrainRequest,
    decode,
    encode,
    longest_record,
)
from consilience.flower.registry import Registry, RemoteFederation
from consilience.flower.states import RemoteStates
from consilience.flower.updates import LARGE, LARGEST, check_update, magnitude
from consilience.secure import Encoding, Fold
from consilience.tasks.task import Task

log = logging.getLogger("consilience")


@dataclass(frozen=True)
class Template:
    """An update with the right types and shapes, the names of the notes that come with it, the most bytes that it can
    have, and the integers that stand for it in a secure sum."""

    update: Tree
    notes: frozenset[str]
    longest: int
    encoding: Encoding | None = None


@dataclass(frozen=True)
class Attempt:
    """The result of one attempt: the accepted clients' share, the clients that have lost their states, the bytes sent
    to clients, and (client, token, state) of the accepted clients, each computed when it is asked for. A `final`
    attempt ends the round, even without a result."""

    share: Share
    lost: set[int]
    bytes_down: int
    accepted: Iterable[tuple[int, Token, Tree]]
    final: bool = False


@dataclass
class Exchange:
    """Requests and replies of one algorithm's rounds."""

    coordinator: Coordinator
    registry: Registry
    algorithm: Algorithm
    task: Task
    federation: RemoteFederation
    stage: int
    seed: int
    most: int | None
    """The most clients of a round; None for all."""
    precision: str
    folder: Path
    """Where updates are kept while an attempt lasts."""
    _limited: set[int] = field(default_factory=set)
    """The clients whose weight was reduced. Each is logged once."""
    _refused: dict[int, str] = field(default_factory=dict)
    """Why clients' last updates were refused, until the clients are told."""

    def use(self, registry: Registry) -> None:
        """Go on with the sites of this registry."""
        self.registry, self.federation = registry, self.federation.of(registry)

    @property
    def cohort(self) -> int:
        """The number of clients of a round."""
        clients = len(self.registry.taking_part)
        return clients if self.most is None else min(self.most, clients)

    def template(self, server: Tree, states: States, ids: Tensor) -> Template:
        """The template of an update."""
        one, notes = template_of(
            self.algorithm, self.task, self.federation, server, states, ids, seed=self.seed, cohort=self.cohort
        )
        return Template(one, notes, longest_record(one))

    @contextmanager
    def attempt(
        self, server: Tree, states: RemoteStates, chosen: list[int], round: int, template: Template
    ) -> Iterator[Attempt]:
        """Send requests to the chosen clients and merge what they return. The updates are kept until the block ends."""
        orders = self.orders(server, states, chosen, round)
        timeout = self.coordinator.participation.timeout
        shares: dict[int, Share] = {}
        lost: set[int] = set()
        with self._updates(server, template) as updates:
            replies = self.coordinator.ask("train", orders.names, orders.content, timeout, template.longest)
            for name, content in replies:
                client = self.registry.names.index(name)
                try:
                    reply, records = decode(content, TrainReply, template.longest)
                    if reply.status == "lost":
                        lost.add(client)
                    share, update = self._share(client, reply, records, round, template)
                    measures = self._measures(client, update, orders.message_to(client), states)
                    self._take(updates, client, update)
                    shares[client] = replace(share, measures=measures)
                    del update, records
                except RecordError as error:
                    shares[client] = Share(rejected={client: str(error)})
                del content  # before the next is read
            merged = self._judged(server, shares, updates, round)
            followed = self._followed(states, updates, merged.accepted, orders.token)
            yield Attempt(merged, lost, orders.bytes_down, followed)

    def _updates(self, server: Tree, template: Template) -> Updates:
        """What takes the updates of an attempt. They are needed again if the method may refuse some, if clients' states
        follow from them, or if the server's own numbers are so large that the largest updates may have to go."""
        if not self.algorithm.additive:
            return OneByOne()
        kind = type(self.algorithm)
        judged, followed = kind.refusals is not Algorithm.refusals, kind.follow is not Algorithm.follow
        again = judged or followed or not magnitude(server) <= LARGE
        return Folded(Fold(template.update, self.cohort), Spill(self.folder, template.update), again)

    def _take(self, updates: Updates, client: int, update: Tree) -> None:
        try:
            updates.take(client, update)
        except RecordError as error:
            self._refused[client] = str(error)
            raise

    def _judged(self, server: Tree, shares: dict[int, Share], updates: Updates, round: int) -> Share:
        """The share of all clients but those that are refused, which are taken away until nobody is refused."""
        while True:
            merged = reduce(lambda a, b: a.merge(b, self.algorithm.additive), (shares[c] for c in sorted(shares)))
            merged = replace(merged, update=to(updates.together(), self.task.device))
            refused = refused_clients(self.algorithm, server, merged) or self._overflowing(
                server, updates, merged, round
            )
            if not refused:
                return merged
            del merged
            for client, reason in refused.items():
                updates.drop(client)
                shares[client] = Share(rejected={client: reason})
            self._refused |= refused

    def _overflowing(self, server: Tree, updates: Updates, merged: Share, round: int) -> dict[int, str]:
        """The client with the largest numbers, and why it is rejected, if numbers of the server's state would overflow
        in this round. The server tries the updates only if their numbers, or its own, are large."""
        sizes, now = updates.sizes, magnitude(server)
        if not sizes or not now <= LARGEST or max([now, *sizes.values()]) <= LARGE:
            return {}
        if self.stays_finite(server, merged.update, round):
            return {}
        worst = max(sizes, key=lambda client: sizes[client])
        return {worst: "its update is so large that numbers of the server's state would overflow"}

    def stays_finite(self, server: Tree, update: Tree, round: int) -> bool:
        """Whether the server's state and mean after a round with these updates have numbers of use."""
        key = keys.key(self.seed, purpose="server", round=round).to(self.task.device)
        try:
            after = self.algorithm.advance(self.task, self.algorithm.fuse(server, update), key)
            return magnitude((after, self.algorithm.posterior(after).mean)) <= LARGEST
        except torch.OutOfMemoryError:
            raise
        except Exception:  # decompositions and solvers fail where numbers overflow
            return False

    def _measures(self, client: int, update: Tree, message: Tree, states: RemoteStates) -> dict[str, Tensor]:
        """The measures of one client's update."""
        measures = self.algorithm.measures(
            to(message, self.task.device),
            to(states.gather(torch.tensor([client])), self.task.device),
            to(self._row(update), self.task.device),
            n=self.federation.sizes[client].to(self.task.initial()).view(1, 1),
            round_size=self.cohort,
            examples=self.federation.examples,
        )
        found: dict[str, Tensor] = to(measures, "cpu")
        return found

    def _row(self, update: Tree) -> Tree:
        """A client's update with a client axis."""
        return tree_map(lambda leaf: leaf.unsqueeze(0), update) if self.algorithm.additive else update

    def _followed(
        self, states: RemoteStates, updates: Updates, accepted: list[int], token: Token
    ) -> Iterator[tuple[int, Token, Tree]]:
        """(client, token, state) of the accepted clients; the state is None if only the client can know it."""
        follows = type(self.algorithm).follow is not Algorithm.follow
        for client in accepted:
            before = states.gather(torch.tensor([client]))
            if before is None or not follows:
                yield client, NO_STATE if before is None else token, None
                continue
            yield client, token, self.algorithm.follow(before, to(self._row(updates.of(client)), states.device))

    def orders(self, server: Tree, states: RemoteStates, chosen: list[int], round: int) -> "Orders":
        message = self.algorithm.message(server, torch.tensor(chosen))
        shared = None if isinstance(message, Addressed) else pack(message)
        refused = {client: self._refused.pop(client, "") for client in chosen}
        token = Token(self.registry.start, self.coordinator.next_request())
        return Orders(self, states, round, chosen, message, shared, refused, token)

    def _share(
        self, client: int, reply: TrainReply, records: dict[str, bytes], round: int, template: Template
    ) -> tuple[Share, Tree]:
        """(a client's share of the round without its update, the update); a RecordError if its reply is rejected."""
        if reply.status != "done":
            raise RecordError(reply.reason)
        if "update" not in records:
            raise RecordError("its reply has no update")
        if set(reply.notes) != template.notes:
            raise RecordError("its notes are not those of the method")
        examples = int(self.federation.sizes[client])
        update, claimed = check_update(records["update"], template.update, client=client, examples=examples)
        if claimed is not None and client not in self._limited:
            self._limited.add(client)
            name = self.federation.name(client)
            log.warning("round %d: %r claims a weight of %g, which is reduced", round, name, claimed)
        notes = {name: torch.tensor([value], dtype=torch.float64) for name, value in reply.notes.items()}
        acted = reply.guards | ({} if claimed is None else {"weight reduced": 1})
        return Share(None, None, [client], {}, notes, guards=acted, bytes_up=nbytes(update)), update


@dataclass
class Orders:
    """The training requests of an attempt, each made when it is sent. `shared` is the packed message if it is the same
    for all, and `refused` says why clients' last updates were refused."""

    exchange: Exchange
    states: RemoteStates
    round: int
    chosen: list[int]
    message: Tree
    shared: bytes | None
    refused: dict[int, str]
    token: Token
    _sizes: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [self.exchange.federation.name(client) for client in self.chosen]

    @property
    def bytes_down(self) -> int:
        """The bytes of the records that were sent, each client's once."""
        return sum(self._sizes.values())

    def message_to(self, client: int) -> Tree:
        return part_of(self.message, torch.tensor([self.chosen.index(client)]))

    def content(self, name: str, secure: SecurePart | None = None) -> RecordDict:
        """The request to a site, whose answer goes into a sum if it has a `secure` part."""
        exchange, states = self.exchange, self.states
        client = exchange.registry.names.index(name)
        records = {"message": self.shared or pack(self.message_to(client))}
        base = states.token(client)
        if base == NO_STATE:
            state = states.gather(torch.tensor([client]))
            records |= {} if state is None else {"state": pack(state)}
        self._sizes[name] = sum(map(len, records.values()))
        request = TrainRequest(
            experiment=exchange.registry.experiment,
            fingerprint=exchange.coordinator.fingerprint,
            preparation=exchange.coordinator.preparation,
            stage=exchange.stage,
            round=self.round,
            client=client,
            round_size=exchange.cohort,
            examples=exchange.federation.examples,
            seed=exchange.seed,
            precision=exchange.precision,
            token=self.token,
            base=base,
            keep=states.kept(client),
            refused=self.refused[client],
            leaving=exchange.registry.members[client].status == "leaving",
            secure=secure,
        )
        return encode(request, **records)
