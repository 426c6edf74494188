"""One attempt at a round: training requests to the chosen clients, and their checked replies."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from flwr.app import RecordDict
from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.core import keys
from consilience.core.errors import RecordError
from consilience.core.records import Addressed, Tree, nbytes, pack, to, tree_map
from consilience.data import Cohort, Federation
from consilience.engines import Share, States, part_of, refused_clients
from consilience.flower.coordinator import Coordinator
from consilience.flower.messages import (
    NO_STATE,
    Token,
    TrainReply,
    TrainRequest,
    decode,
    encode,
    longest_record,
    packed_records,
)
from consilience.flower.registry import Registry
from consilience.flower.states import RemoteStates
from consilience.flower.updates import LARGE, LARGEST, TEMPLATE_EXAMPLES, check_update, magnitude
from consilience.tasks.task import Task

log = logging.getLogger("consilience")


@dataclass(frozen=True)
class Template:
    """An update with the right types and shapes, the names of the notes that come with it, and the most bytes that it
    can have."""

    update: Tree
    notes: frozenset[str]
    longest: int


@dataclass(frozen=True)
class Attempt:
    """The result of one attempt: the accepted clients' share, their new (token, state), the clients that have lost
    their states, and the bytes sent to clients."""

    share: Share
    accepted: dict[int, tuple[Token, Tree]]
    lost: set[int]
    bytes_down: int


@dataclass
class Exchange:
    """Requests and replies of one algorithm's rounds."""

    coordinator: Coordinator
    registry: Registry
    algorithm: Algorithm
    task: Task
    federation: Federation
    stage: int
    seed: int
    cohort: int
    precision: str
    _limited: set[int] = field(default_factory=set)
    """The clients whose weight was reduced. Each is logged once."""
    _refused: dict[int, str] = field(default_factory=dict)
    """Why clients' last updates were refused, until the clients are told."""

    def template(self, server: Tree, states: States, ids: Tensor) -> Template:
        """The template of an update: `local` of the first client on examples of zeros."""
        offsets = torch.tensor([0, TEMPLATE_EXAMPLES])
        zeros = Federation(self.federation.data, torch.zeros(TEMPLATE_EXAMPLES, dtype=torch.int64), offsets)
        cohort = Cohort(
            zeros.to(self.task.device),
            torch.tensor([0]),
            round=1,
            round_size=self.cohort,
            seed=self.seed,
            dtype=self.task.dtype,
            augment=self.task.augment,
            limit=1,
            examples=self.federation.examples,
        )
        first = ids[:1]
        message = part_of(self.algorithm.message(server, first), slice(0, 1))
        state = to(states.gather(first), self.task.device)
        update, _ = self.algorithm.local(self.task, message, state, cohort)
        one = tree_map(lambda leaf: leaf[0].cpu() if self.algorithm.additive else leaf.cpu(), update)
        return Template(one, frozenset(cohort.notes), longest_record(one))

    def attempt(self, server: Tree, states: RemoteStates, chosen: list[int], round: int, template: Template) -> Attempt:
        """Send requests to the chosen clients and merge what they return."""
        token = Token(self.registry.start, self.coordinator.next_request())
        message = self.algorithm.message(server, torch.tensor(chosen))
        requests = dict(self._requests(message, states, chosen, round, token))
        shares: dict[int, Share] = {}
        lost: set[int] = set()
        timeout = self.coordinator.participation.timeout
        for name, content in self.coordinator.ask("train", requests, timeout, template.longest):
            client = self.registry.names.index(name)
            try:
                reply, records = decode(content, TrainReply, template.longest)
                if reply.status == "lost":
                    lost.add(client)
                share = self._share(client, reply, records, round, template)
                own = to(part_of(message, torch.tensor([chosen.index(client)])), self.task.device)
                shares[client] = self._measured(share, client, own, states)
            except RecordError as error:
                shares[client] = Share(rejected={client: str(error)})
        while True:
            merged = reduce(lambda a, b: a.merge(b, self.algorithm.additive), (shares[c] for c in sorted(shares)))
            merged = replace(merged, update=to(merged.update, self.task.device))
            refused = refused_clients(self.algorithm, server, merged) or self._overflowing(
                server, shares, merged, round
            )
            if not refused:
                break
            shares |= {client: Share(rejected={client: reason}) for client, reason in refused.items()}
            self._refused |= refused
        accepted = {c: self._new_state(states, c, token, shares[c].update) for c in merged.accepted}
        down = sum(len(data) for content in requests.values() for data in packed_records(content).values())
        return Attempt(merged, accepted, lost, down)

    def _overflowing(self, server: Tree, shares: dict[int, Share], merged: Share, round: int) -> dict[int, str]:
        """The client with the largest numbers, and why it is rejected, if numbers of the server's state would overflow
        in this round. The server tries the updates only if their numbers, or its own, are large."""
        sizes, now = {client: magnitude(shares[client].update) for client in merged.accepted}, magnitude(server)
        if not sizes or not now <= LARGEST or max([now, *sizes.values()]) <= LARGE:
            return {}
        if self._stays_finite(server, merged.update, round):
            return {}
        worst = max(sizes, key=lambda client: sizes[client])
        return {worst: "its update is so large that numbers of the server's state would overflow"}

    def _stays_finite(self, server: Tree, update: Tree, round: int) -> bool:
        """Whether the server's state and mean after a round with these updates have numbers of use."""
        key = keys.key(self.seed, purpose="server", round=round).to(self.task.device)
        try:
            after = self.algorithm.advance(self.task, self.algorithm.fuse(server, update), key)
            return magnitude((after, self.algorithm.posterior(after).mean)) <= LARGEST
        except torch.OutOfMemoryError:
            raise
        except Exception:  # decompositions and solvers fail where numbers overflow
            return False

    def _measured(self, share: Share, client: int, message: Tree, states: RemoteStates) -> Share:
        """The share of one client with the measures of its update."""
        measures = self.algorithm.measures(
            message,
            to(states.gather(torch.tensor([client])), self.task.device),
            to(self._row(share.update), self.task.device),
            n=self.federation.sizes[client].to(self.task.initial()).view(1, 1),
            round_size=self.cohort,
            examples=self.federation.examples,
        )
        return replace(share, measures=to(measures, "cpu"))

    def _row(self, update: Tree) -> Tree:
        """A client's update with a client axis."""
        return tree_map(lambda leaf: leaf.unsqueeze(0), update) if self.algorithm.additive else update

    def _new_state(self, states: RemoteStates, client: int, token: Token, update: Tree) -> tuple[Token, Tree]:
        """(token, state) of an accepted client; the state is None if only the client can know it."""
        before = states.gather(torch.tensor([client]))
        if before is None:
            return NO_STATE, None
        return token, self.algorithm.follow(before, to(self._row(update), states.device))

    def _requests(
        self, message: Tree, states: RemoteStates, chosen: list[int], round: int, token: Token
    ) -> Iterator[tuple[str, RecordDict]]:
        shared = None if isinstance(message, Addressed) else pack(message)
        for i, client in enumerate(chosen):
            records = {"message": shared or pack(part_of(message, slice(i, i + 1)))}
            base = states.token(client)
            if base == NO_STATE:
                state = states.gather(torch.tensor([client]))
                records |= {} if state is None else {"state": pack(state)}
            request = TrainRequest(
                experiment=self.registry.experiment,
                fingerprint=self.coordinator.fingerprint,
                preparation=self.coordinator.preparation,
                stage=self.stage,
                round=round,
                client=client,
                round_size=self.cohort,
                examples=self.federation.examples,
                seed=self.seed,
                precision=self.precision,
                token=token,
                base=base,
                keep=states.kept(client),
                refused=self._refused.pop(client, ""),
            )
            yield self.federation.name(client), encode(request, **records)

    def _share(
        self, client: int, reply: TrainReply, records: dict[str, bytes], round: int, template: Template
    ) -> Share:
        """A client's share of the round; a RecordError if its reply is rejected."""
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
        return Share(update, None, [client], {}, notes, guards=acted, bytes_up=nbytes(update))
