"""Rounds by correspondence: every client of a round is a site of its own."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from flwr.app import RecordDict
from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.algorithms.switch import Method, phases
from consilience.core import keys
from consilience.core.errors import ConfigError, ConsilienceError, RecordError
from consilience.core.files import CHECKPOINTS
from consilience.core.records import Addressed, Tree, nbytes, pack, rows, to, tree_map
from consilience.data.cohort import Cohort, Info
from consilience.data.federation import Federation
from consilience.engines.plan import Plan
from consilience.engines.ranks import ALONE, Alone, Ranks
from consilience.engines.session import Session
from consilience.engines.simulator import PRECISIONS
from consilience.engines.states import States
from consilience.engines.work import Share, part_of
from consilience.evaluation.scores import Evaluation
from consilience.evaluation.scores import evaluate as score
from consilience.flower.checks import BLANK, accepted
from consilience.flower.elsewhere import Elsewhere
from consilience.flower.letters import (
    NOTHING,
    Answer,
    Examination,
    Failed,
    Marks,
    Order,
    Token,
    letter,
    opened,
    sealed,
)
from consilience.flower.office import Office
from consilience.flower.roster import Roster
from consilience.flower.scores import credible, pooled
from consilience.tasks.task import Task

log = logging.getLogger("consilience")
SAMPLES = 10  # draws of a posterior by which sites score it


@dataclass(frozen=True)
class Flower:
    """An engine whose clients are sites with data of their own, that a Flower server app reaches."""

    office: Office
    roster: Roster
    method: Method
    device: str = "cpu"
    precision: str = "float32"
    leads = True
    kept: deque[Tensor] = field(default_factory=lambda: deque(maxlen=CHECKPOINTS))
    """The tokens in the checkpoints that there are."""

    @contextmanager
    def started(self) -> Iterator[tuple[Flower, Ranks]]:
        """(this, one process)."""
        yield self, _Alone()

    def open(
        self,
        algorithm: Algorithm,
        task: Task,
        federation: Federation,
        *,
        seed: int,
        cohort: int,
        rounds: int,
        plan: Plan | None = None,
        ranks: Ranks = ALONE,
    ) -> Correspondence:
        """Make ready for the rounds of one algorithm."""
        if federation.names != self.roster.names:
            raise ConfigError(f"{algorithm.name} is a reference that no real federation can run: it moves the data")
        stage = next(i for i, phase in enumerate(phases(self.method)) if phase.algorithm is algorithm)
        return Correspondence(self, stage, algorithm, task, federation, seed, cohort)


class _Alone(Alone):
    def __str__(self) -> str:
        return "Flower"


class Correspondence(Session):
    """The rounds of one algorithm. An order says from which state to go on, so a site needs no other word that its
    last update was accepted, and nothing that is lost on the way can set server and sites apart."""

    stops_softly = saves_aside = False

    def __init__(
        self,
        engine: Flower,
        stage: int,
        algorithm: Algorithm,
        task: Task,
        federation: Federation,
        seed: int,
        cohort: int,
    ) -> None:
        self._office, self._roster, self._precision = engine.office, engine.roster, engine.precision
        self._stage, self._algorithm, self._seed = stage, algorithm, seed
        self.federation, self.cohort = federation, min(cohort, len(federation))
        self.task = task.prepare(
            torch.device(engine.device), PRECISIONS[engine.precision], compile=False, bf16=False, chunk=1
        )
        self._kept = engine.kept
        self._lost: set[int] = set()
        self._cut: set[int] = set()
        self._like: Tree = None
        self._notes: set[str] = set()

    @property
    def asks_clients(self) -> bool:
        """Whether any site that is here holds examples out."""
        return any(site.held_out for _, site in self._office.here.values())

    def close(self) -> None:
        """There is nothing to give back."""

    def keep(self, states: States) -> States:
        """On the sites' own disks."""
        return Elsewhere(states, len(self.federation), self._kept)

    def settle(self, server: Tree, states: States, ids: Tensor, round: int) -> Plan:
        """Every site computes by itself. What an update looks like is found on examples of zeros."""
        blank = Federation(self.federation.data, torch.zeros(BLANK, dtype=torch.int64), torch.tensor([0, BLANK]))
        cohort = Cohort(
            blank.to(self.task.device),
            torch.tensor([0]),
            round=1,
            round_size=self.cohort,
            seed=self._seed,
            dtype=self.task.dtype,
            augment=self.task.augment,
            limit=1,
            examples=self.federation.examples,
        )
        first = ids[:1]
        update, _ = self._algorithm.local(
            self.task,
            part_of(self._algorithm.message(server, first), slice(0, 1)),
            to(states.gather(first), self.task.device),
            cohort,
        )
        self._like = tree_map(lambda leaf: leaf[0].cpu() if self._algorithm.additive else leaf.cpu(), update)
        self._notes = set(cohort.notes)
        return Plan(chunk=1, why="every client at its own site", device=self.task.device.type)

    def _amended(self, server: Tree, states: Elsewhere, round: int) -> Tree:
        """Sites that lost their states begin anew: what the server has of them is exchanged for a fresh state around
        what it believes now, which they will be sent."""
        for client in sorted(self._lost):
            one = torch.tensor([client])
            numbers = (torch.tensor(value) for value in (self._seed, len(self.federation), self.federation.examples))
            mean, initial = self._algorithm.posterior(server).mean, self.task.initial()
            info = Info(mean if mean.shape == initial.shape else initial, *numbers)
            n = self.federation.sizes[one].to(initial).unsqueeze(1)
            fresh = to(self._algorithm.client(self.task, info, n), states.device)
            old, new = (to(rows(state, 0), self.task.device) for state in (states.gather(one), fresh))
            server = self._algorithm.swap(server, old, new)
            states.send_again(client, fresh, round)
            log.warning("round %d: %r has lost its state and begins anew", round, self.federation.name(client))
        self._lost.clear()
        return server

    def round(self, server: Tree, states: States, ids: Tensor, round: int) -> tuple[Share, int]:
        """Orders to the round's clients, until enough of them have answered with something fit to use."""
        assert isinstance(states, Elsewhere)
        least, pause = min(self._office.manners.min_clients, self.cohort), 1.0
        for _ in self._office.waiting(lambda: f"round {round} needs {least} of its clients"):
            server = self._amended(server, states, round)
            chosen = self._chosen(ids, round)
            if len(chosen) < least:
                continue
            share, answers, down = self._correspond(server, states, chosen, round)
            if len(share.accepted) >= least:
                for client, (token, state) in answers.items():
                    states.accept(client, token, state, round)
                return replace(share, server=server), down
            for client, reason in share.rejected.items():
                log.warning("round %d: %r gave nothing: %s", round, self.federation.name(client), reason)
            self._office.sleep(pause)
            pause = min(2 * pause, 60.0)
        raise ConsilienceError(
            f"round {round} was given up: it needs updates of {least} clients, and within patience = "
            f"{self._office.manners.patience:g} seconds there were not as many. What was learned so far is kept: run "
            "the app again when the sites are back, and it goes on"
        )

    def _chosen(self, ids: Tensor, round: int) -> list[int]:
        """The round's clients; those that are not here have others in their place, if there are any."""
        names = self.federation.names or ()
        here = {names.index(name) for name in self._office.settled(names)}
        planned = [client for client in ids.tolist() if client in here]
        others = sorted(here - set(planned))
        order = keys.bits(keys.key(self._seed, purpose="in place of others", round=round), len(names)).tolist()
        return sorted(planned + sorted(others, key=lambda client: order[client])[: self.cohort - len(planned)])

    def _correspond(
        self, server: Tree, states: Elsewhere, chosen: list[int], round: int
    ) -> tuple[Share, dict[int, tuple[Token, Tree]], int]:
        """One try of a round: (the share of those who answered, their new states, bytes sent down)."""
        token = Token(self._roster.start, self._office.next_order())
        letters = dict(self._orders(server, states, chosen, round, token))
        shares: dict[int, Share] = {}
        for name, content in self._office.ask("train", letters, self._office.manners.timeout):
            client = self._roster.names.index(name)
            shares[client] = self._share(client, content, round)
        together = reduce(lambda a, b: a.merge(b, self._algorithm.additive), (shares[c] for c in sorted(shares)))
        answers: dict[int, tuple[Token, Tree]] = {}
        for client in together.accepted:
            update = to(shares[client].update, states.device)
            row = tree_map(lambda leaf: leaf.unsqueeze(0) if self._algorithm.additive else leaf, update)
            before = states.gather(torch.tensor([client]))
            answers[client] = (NOTHING, None) if before is None else (token, self._algorithm.follow(before, row))
        down = sum(len(data) for content in letters.values() for data in sealed(content).values())
        return replace(together, update=to(together.update, self.task.device)), answers, down

    def _orders(
        self, server: Tree, states: Elsewhere, chosen: list[int], round: int, token: Token
    ) -> Iterator[tuple[str, RecordDict]]:
        message = self._algorithm.message(server, torch.tensor(chosen))
        shared = None if isinstance(message, Addressed) else pack(message)
        for i, client in enumerate(chosen):
            records = {"message": shared or pack(part_of(message, slice(i, i + 1)))}
            base = states.token(client)
            if base == NOTHING:
                state = states.gather(torch.tensor([client]))
                records |= {} if state is None else {"state": pack(state)}
            order = Order(
                experiment=self._roster.experiment,
                fingerprint=self._office.fingerprint,
                stage=self._stage,
                round=round,
                client=client,
                round_size=self.cohort,
                examples=self.federation.examples,
                seed=self._seed,
                precision=self._precision,
                token=token,
                base=base,
                keep=states.kept(client),
            )
            yield self.federation.name(client), letter(order, **records)

    def _share(self, client: int, content: RecordDict | Failed, round: int) -> Share:
        """A site's answer, checked."""
        try:
            answer, records = opened(content, Answer)
            if answer.kind != "done":
                if answer.kind == "lost":
                    self._lost.add(client)
                raise RecordError(answer.reason)
            if "update" not in records:
                raise RecordError("its answer has no update")
            if set(answer.notes) != self._notes:
                raise RecordError("what it notes is not what the method notes")
            update, cut = accepted(records["update"], self._like, client, int(self.federation.sizes[client]))
        except RecordError as error:
            return Share(rejected={client: str(error)})
        if cut is not None and client not in self._cut:
            self._cut.add(client)
            log.warning("round %d: %r claims a weight of %g, which is cut", round, self.federation.name(client), cut)
        notes = {name: torch.tensor([value], dtype=torch.float64) for name, value in answer.notes.items()}
        acted = answer.guards | ({} if cut is None else {"weight cut": 1})
        return Share(update, None, [client], {}, notes, acted, nbytes(update))

    def evaluate(self, algorithm: Algorithm, server: Tree) -> Evaluation | None:
        """How the sites that hold examples out score what the server believes."""
        if algorithm.network(self.task, server) is not self.task:
            log.warning("%s makes another network than the clients', which sites cannot score", algorithm.name)
            return None
        belief = algorithm.posterior(server)
        examination = Examination(fingerprint=self._office.fingerprint, precision=self._precision, samples=SAMPLES)
        content = letter(examination, belief=pack(belief))
        here = self._office.settled(self._roster.names)
        held_out = {name: count for name in here if (count := self._office.here[name][1].held_out)}
        like = score(self.task, belief, self.federation.data, samples=1)
        marks: dict[str, Marks] = {}
        for name, answer in self._office.ask(
            "evaluate", dict.fromkeys(held_out, content), self._office.manners.timeout
        ):
            try:
                marks[name] = credible(opened(answer, Marks)[0], like, held_out[name])
            except RecordError as error:
                log.warning("%r has not scored the model: %s", name, error)
        return pooled({name: marks[name] for name in sorted(marks)}, type(belief).__name__)
