"""The rounds of a federation of real sites."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from flwr.app import RecordDict
from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.core import ConsilienceError, Tree, keys, pack, rows, to
from consilience.engines import Plan, RoundResult, Session, States, fresh_states
from consilience.engines.choice import Say, silent
from consilience.evaluation.calibration import Calibration
from consilience.evaluation.predictions import SAMPLES
from consilience.evaluation.scores import Evaluation, evaluate
from consilience.flower.calibration import calibrate_at_sites
from consilience.flower.exchange import Exchange, Template
from consilience.flower.membership import Membership
from consilience.flower.messages import (
    NO_STATE,
    CalibrateRequest,
    EvaluateRequest,
    SecurePart,
    StatisticsRequest,
    Token,
    encode,
)
from consilience.flower.scores import evaluate_at_sites
from consilience.flower.states import RemoteStates
from consilience.flower.statistics import sums_of_sites
from consilience.tasks.statistics import Sums, estimate, with_sums

log = logging.getLogger("consilience")
Content = Callable[..., RecordDict]
"""A function of a site's name, and of its part in a secure sum if there is one, that returns the request."""


def follows(algorithm: Algorithm) -> bool:
    """Whether clients' whole states follow from their updates, so that the server knows them."""
    return type(algorithm).follow is not Algorithm.follow and not algorithm.private_state


class FlowerSession(Session):
    """The rounds of one algorithm. Each request names the state to start from, so a site needs no other
    acknowledgement of its last update, and a lost message cannot make the server and the sites disagree."""

    stops_softly = saves_aside = False
    fewest = 1
    """The fewest clients of a round, whatever the participation is."""

    def __init__(self, exchange: Exchange, saved_tokens: deque[Tensor]) -> None:
        self._exchange, self._coordinator = exchange, exchange.coordinator
        self._algorithm, self._seed, self._saved_tokens = exchange.algorithm, exchange.seed, saved_tokens
        self.task, self.federation, self.cohort = exchange.task, exchange.federation, exchange.cohort
        self._members = exchange.registry.members
        self._lost: set[int] = set()
        self._template: Template | None = None

    @property
    def asks_clients(self) -> bool:
        return any(site.held_out for _, site in self._coordinator.online.values())

    def close(self) -> None:
        pass

    @property
    def knows_states(self) -> bool:
        """Whether the server knows the clients' states."""
        return follows(self._algorithm)

    def keep(self, states: States) -> States:
        experiment = self._exchange.registry.experiment
        return RemoteStates(states, len(self.federation), self._saved_tokens, self.knows_states, experiment)

    def settle(self, server: Tree, states: States, ids: Tensor, round: int, say: Say = silent) -> Plan:
        """Compute the template of an update. Each site plans its own computation."""
        self._template = self._exchange.template(server, states, ids)
        return Plan(chunk=1, why="every client at its own site", device=self.task.device.type)

    def round(self, server: Tree, states: States, ids: Tensor, round: int) -> RoundResult:
        """Ask the round's clients, and ask again until at least `min_clients` updates are accepted."""
        assert isinstance(states, RemoteStates)
        assert self._template is not None
        participation = self._coordinator.participation
        pause = 1.0
        for _ in self._coordinator.waiting(lambda: f"round {round} needs {self._least} of its clients"):
            server = self._with_members(self._restart_lost(server, states, round), states, round)
            chosen = self._choose(ids, round)
            if len(chosen) < self._least:
                continue
            with self._exchange.attempt(server, states, chosen, round, self._template) as attempt:
                self._lost |= attempt.lost
                if len(attempt.share.accepted) >= self._least or attempt.final:
                    for client, token, state in attempt.accepted:
                        states.accept(client, token, state, round)
                    self._let_go(attempt.share.accepted, states, round)
                    return RoundResult(attempt.share, server, attempt.bytes_down)
            for client, reason in attempt.share.rejected.items():
                log.warning("round %d: no update from %r: %s", round, self.federation.name(client), reason)
            self._coordinator.sleep(pause)
            pause = min(2 * pause, 60.0)
        raise ConsilienceError(
            f"round {round} was given up: it needs updates of {self._least} clients, and fewer came within patience = "
            f"{participation.patience:g} seconds. All earlier rounds are saved. Run the app again when the sites are "
            "online, and it resumes"
        )

    @property
    def _least(self) -> int:
        """The fewest updates of a round."""
        return max(self.fewest, min(self._coordinator.participation.min_clients, self.cohort))

    def _with_members(self, server: Tree, states: RemoteStates, round: int) -> Tree:
        """The server's state after changes of who takes part."""
        membership = Membership(self._exchange, states, round)
        membership.read()
        server = membership.update(server, self._forgettable_state, self._leaving(states))
        registry = self._exchange.registry
        if not registry.taking_part:
            raise ConsilienceError("no site takes part any more: admit one by `consilience flower admit`")
        if registry.members != self._members:
            self.federation, self.cohort = self._exchange.federation, self._exchange.cohort
            self._members = registry.members
            self._template = self._exchange.template(server, states, torch.tensor(registry.taking_part))
        return server

    def _leaving(self, states: RemoteStates) -> set[int]:
        """The clients that take their parts out of the server's state themselves."""
        return set()

    def _let_go(self, accepted: list[int], states: RemoteStates, round: int) -> None:
        """Record which clients have taken their parts out."""
        for client in self._leaving(states).intersection(accepted):
            Membership(self._exchange, states, round).forgotten(client)

    def _choose(self, ids: Tensor, round: int) -> list[int]:
        """The online clients among `ids`, and random other clients in place of those that are offline."""
        names, registry = self.federation.names or (), self._exchange.registry
        able = [names[client] for client in registry.taking_part]
        online = {names.index(name) for name in self._coordinator.available(able)}
        planned = [client for client in ids.tolist() if client in online]
        others = sorted(online - set(planned))
        order = keys.bits(keys.key(self._seed, purpose="in place of others", round=round), len(names)).tolist()
        return sorted(planned + sorted(others, key=lambda client: order[client])[: self.cohort - len(planned)])

    def _restart_lost(self, server: Tree, states: RemoteStates, round: int) -> Tree:
        """The server's state after it has replaced each lost client state by a fresh one around the present mean. The
        next request to such a client brings the fresh state."""
        for client in sorted(self._lost):
            one = torch.tensor([client])
            fresh = to(
                fresh_states(self._algorithm, self.task, self.federation, server, one, self._seed), states.device
            )
            old, new = self._known_state(server, states, client), to(rows(fresh, 0), self.task.device)
            server = self._algorithm.swap(server, old, new)
            states.send_again(client, fresh, round)
            log.warning("round %d: %r has lost its state and gets a new one", round, self.federation.name(client))
        self._lost.clear()
        return server

    def _known_state(self, server: Tree, states: RemoteStates, client: int) -> Tree:
        """The state of a client, without client axis, as the server knows it."""
        return to(rows(states.gather(torch.tensor([client])), 0), self.task.device)

    def _forgettable_state(self, server: Tree, states: RemoteStates, client: int) -> Tree:
        """The state of a client that is to be forgotten; an error if only its site knows it."""
        return self._known_state(server, states, client)

    def evaluate(
        self,
        algorithm: Algorithm,
        server: Tree,
        states: States,
        statistics: Sums | None,
        calibration: Calibration | None,
    ) -> Evaluation | None:
        if not self._can_predict(algorithm, server, statistics):
            return None
        task = self.task if statistics is None else with_sums(self.task, statistics)
        belief_for = self._beliefs(algorithm, server, states, statistics)
        sets = {} if calibration is None else {"calibration": pack(calibration)}

        def content(name: str, secure: SecurePart | None = None) -> RecordDict:
            base, records = belief_for(name)
            return encode(EvaluateRequest(**self._facts, base=base, secure=secure), **records, **sets)

        data = self.federation.data
        template = evaluate(task, algorithm.posterior(server), data, samples=1, calibration=calibration)
        return self._scores(content, template)

    def _scores(self, content: Content, template: Evaluation) -> Evaluation | None:
        """The scores that sites give, by requests with this content."""
        return evaluate_at_sites(self._coordinator, self._exchange.registry.active, content, template)

    def calibrate(
        self, algorithm: Algorithm, server: Tree, states: States, statistics: Sums | None
    ) -> Calibration | None:
        if not self._can_predict(algorithm, server, statistics):
            return None
        belief_for = self._beliefs(algorithm, server, states, statistics)

        def content(name: str, secure: SecurePart | None = None) -> RecordDict:
            base, records = belief_for(name)
            return encode(CalibrateRequest(**self._facts, base=base, score="lac", secure=secure), **records)

        return self._calibration(content)

    def _calibration(self, content: Content) -> Calibration | None:
        """The calibration by the counts of sites, by requests with this content."""
        return calibrate_at_sites(self._coordinator, self._exchange.registry.active, content, self.task)

    @property
    def _facts(self) -> dict[str, Any]:
        """The fields that requests about a belief have in common."""
        return {
            "fingerprint": self._coordinator.fingerprint,
            "preparation": self._coordinator.preparation,
            "seed": self._seed,
            "precision": self._exchange.precision,
            "experiment": self._exchange.registry.experiment,
            "samples": SAMPLES,
        }

    def _beliefs(
        self, algorithm: Algorithm, server: Tree, states: States, statistics: Sums | None
    ) -> Callable[[str], tuple[Token, dict[str, bytes]]]:
        """A function of a site's name that returns the name of its state and the records that it needs to predict."""
        assert isinstance(states, RemoteStates)
        own, names = algorithm.personalises, self.federation.names or ()
        shared = {"server": pack(server)} if own else {"belief": pack(algorithm.posterior(server))}
        shared |= {} if statistics is None else {"statistics": pack(statistics)}

        def belief_for(name: str) -> tuple[Token, dict[str, bytes]]:
            if not own:
                return NO_STATE, shared
            client = names.index(name)
            base = states.token(client)
            state = {"state": pack(states.gather(torch.tensor([client])))} if base == NO_STATE else {}
            return base, {**shared, **state}

        return belief_for

    def _can_predict(self, algorithm: Algorithm, server: Tree, statistics: Sums | None) -> bool:
        """Whether sites can predict with the belief; the log says why not."""
        if algorithm.network(self.task, server) is not self.task:
            log.warning("sites cannot score %s: its final network is not the clients' network", algorithm.name)
            return False
        if algorithm.personalises and statistics is not None:
            log.warning(
                "sites cannot score %s: their models differ, and statistics of BatchNorm layers are estimated for one; "
                "make the task with batch_norm='averaged'",
                algorithm.name,
            )
            return False
        return True

    def statistics(self, theta: Tensor) -> Sums | None:
        """The sums of all sites that are online, in several passes; None if no site sends valid ones."""
        request = StatisticsRequest(
            fingerprint=self._coordinator.fingerprint,
            preparation=self._coordinator.preparation,
            seed=self._seed,
            precision=self._exchange.precision,
        )
        return estimate(lambda total: self._sums(theta, request, total))

    def _sums(self, theta: Tensor, request: StatisticsRequest, total: Sums | None) -> Iterable[Sums]:
        """The sums of sites in one pass, given those of the pass before."""
        names = self._exchange.registry.active
        return sums_of_sites(self._coordinator, names, self.federation, self.task, theta, request, total)
