"""The rounds of a federation under secure aggregation: the server sees sums over sites, and no answer of one site."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from consilience.core import ConsilienceError, DataError, Point, Weighted, pack
from consilience.core.records import Tree, to
from consilience.engines import Share, States
from consilience.evaluation.calibration import LEVEL, Calibration
from consilience.evaluation.scores import Evaluation
from consilience.evaluation.sets import check_score
from consilience.flower.calibration import empty
from consilience.flower.contribution import Contribution
from consilience.flower.exchange import Attempt, Exchange, Template
from consilience.flower.messages import (
    CALIBRATION,
    NO_STATE,
    STATISTICS,
    CalibrateRequest,
    EvaluateRequest,
    Request,
    SecurePart,
    StatisticsRequest,
    TrainRequest,
    encode,
)
from consilience.flower.secure_scores import evaluation_of, sums_of
from consilience.flower.secure_sums import Outcome, SecureSums
from consilience.flower.session import Content, FlowerSession
from consilience.flower.states import RemoteStates
from consilience.flower.statistics import template_sums
from consilience.flower.updates import LARGE, magnitude
from consilience.secure import Encoding
from consilience.secure.client import FEWEST
from consilience.tasks.statistics import Sums

log = logging.getLogger("consilience")


class SecureExchange(Exchange):
    """Attempts at rounds whose updates the server sees as one sum. A round whose sum sites may have opened has no
    second attempt: they would not answer it with other sites."""

    @property
    def sums(self) -> SecureSums:
        """Secure sums among the sites."""
        return SecureSums(self.coordinator, self.registry.experiment)

    def template(self, server: Tree, states: States, ids: Tensor) -> Template:
        """The template of a contribution."""
        one = super().template(server, states, ids)
        nothing = Weighted(*torch.zeros(2, 1, dtype=torch.float64))
        like = Contribution(one.update, torch.tensor([0]), dict.fromkeys(sorted(one.notes), nothing), torch.tensor([0]))
        encoding = Encoding.of(like, clients=self.cohort, largest=self._largest, examples=self.federation.examples)
        return replace(one, encoding=encoding)

    @property
    def _largest(self) -> int:
        return int(self.federation.sizes.max())

    @contextmanager
    def attempt(
        self, server: Tree, states: RemoteStates, chosen: list[int], round: int, template: Template
    ) -> Iterator[Attempt]:
        assert template.encoding is not None
        orders, names = self.orders(server, states, chosen, round), self.registry.names

        def content(name: str, part: SecurePart | None) -> Any:
            counted = self.registry.members[names.index(name)].examples
            return orders.content(name, part and part.model_copy(update={"counted": counted}))

        outcome = self.sums.sum(
            "train",
            TrainRequest,
            f"round {round} of stage {self.stage}",
            orders.names,
            content,
            template.encoding,
            largest=self._largest,
            examples=self.federation.examples,
            attempt=f"{orders.token.start}-{orders.token.number}",
        )
        share = self._share_of(outcome, chosen, server, round)
        accepted = ((c, NO_STATE if states.gather(torch.tensor([c])) is None else orders.token, None)
                    for c in share.accepted)  # fmt: skip
        lost = {names.index(name) for name in outcome.lost}
        yield Attempt(share, lost, orders.bytes_down, accepted, final=outcome.spent)

    def _share_of(self, outcome: Outcome, chosen: list[int], server: Tree, round: int) -> Share:
        """The share of all sites together. Those that withhold their updates count as accepted: nobody knows them."""
        names, reason = self.registry.names, outcome.reason
        rejected = {names.index(name): why for name, why in outcome.failures.items()}
        total: Contribution | None = outcome.total
        if total is not None:
            update = to(total.update, self.task.device)
            reason = self._objection(server, update, round) if int(total.took_part) else "all sites withhold their own"
        if total is None or reason:
            log.warning("round %d has no result: %s", round, reason)
            return Share(rejected=dict.fromkeys(chosen, reason) | rejected, bytes_up=outcome.bytes_up)
        accepted = sorted(names.index(name) for name in outcome.arrived)
        rejected = {client: why for client, why in rejected.items() if client not in accepted}
        notes = {name: torch.full((len(accepted),), mean, dtype=torch.float64) for name, mean in total.means().items()}
        acted = {"at sites": int(total.guards), "update withheld": len(accepted) - int(total.took_part)}
        return Share(update, None, accepted, rejected, notes, guards=acted, bytes_up=outcome.bytes_up)

    def _objection(self, server: Tree, update: Tree, round: int) -> str:
        """Why a whole round is dropped, judged by its sum alone."""
        if reason := self.algorithm.implausible(server, update):
            return reason
        if magnitude((server, update)) > LARGE and not self.stays_finite(server, update, round):
            return "the sum of the updates is so large that numbers of the server's state would overflow"
        return ""


class SecureSession(FlowerSession):
    """Rounds, scores, calibrations and statistics by secure sums."""

    fewest = FEWEST
    _exchange: SecureExchange

    @property
    def knows_states(self) -> bool:
        return False

    def _known_state(self, server: Tree, states: RemoteStates, client: int) -> Tree:
        share = float(self.federation.sizes[client]) / self.federation.examples
        guess = self._algorithm.estimate(server, share)
        if guess is None:
            raise ConsilienceError(
                f"under secure aggregation only {self.federation.name(client)!r} knows its part in the server's state "
                f"of {self._algorithm.name}: if the site has lost its folder of states, restore it from a backup"
            )
        log.warning("the state of %r is replaced by an estimate, its share of the whole", self.federation.name(client))
        return guess

    def _forgettable_state(self, server: Tree, states: RemoteStates, client: int) -> Tree:
        if not self._exchange.registry.members[client].estimated:
            raise ConsilienceError(
                "under secure aggregation only the site knows its part in the server's state, and the updates of "
                f"{self._algorithm.name} cannot take it out: ask for an estimate by `forget --estimate`"
            )
        return self._known_state(server, states, client)

    def _leaving(self, states: RemoteStates) -> set[int]:
        members = enumerate(self._exchange.registry.members)
        asked = [client for client, member in members if member.status == "leaving" and not member.estimated]
        able = asked and self._algorithm.farewell(states.gather(torch.tensor(asked))) is not None
        return set(asked) if able else set()

    def _total(
        self, kind: str, request: type[Request], purpose: str, held: dict[str, int], content: Content, like: Tree,
        most: int = 1,
    ) -> Tree:  # fmt: skip
        """The sum of the answers of sites that hold these numbers of examples, with at most `most` entries each; None
        if there is none, and the log says why."""
        if len(held) < FEWEST:
            log.warning("there are no %s of all sites: %d sites can send some, and a secure sum needs %d",
                        purpose, len(held), FEWEST)  # fmt: skip
            return None
        largest, examples = most * max(held.values()), most * sum(held.values())
        encoding = Encoding.of(like, clients=len(held), largest=largest, examples=examples)
        outcome = self._exchange.sums.sum(
            kind, request, purpose, held, content, encoding, largest=largest, examples=examples,
            attempt=f"{self._exchange.registry.start}-{self._coordinator.next_request()}",
        )  # fmt: skip
        for name, reason in outcome.failures.items():
            log.warning("%r is not in the %s of all sites: %s", name, purpose, reason)
        if outcome.reason:
            log.warning("there are no %s of all sites: %s", purpose, outcome.reason)
        return outcome.total

    def _held(self, what: str) -> dict[str, int]:
        """How many examples of a kind the online sites hold, where they hold any."""
        online = self._coordinator.available(self._exchange.registry.active)
        held = {name: int(getattr(self._coordinator.online[name][1], what)) for name in online}
        return {name: examples for name, examples in held.items() if examples}

    def _scores(self, content: Content, template: Evaluation) -> Evaluation | None:
        total = self._total(
            "evaluate", EvaluateRequest, "scores", self._held("held_out"), content, sums_of(1, template)
        )
        return None if total is None else evaluation_of(total, template)

    def _calibration(self, content: Content) -> Calibration | None:
        held = self._held("calibration")
        if not held:
            return None
        try:
            like = empty(check_score(self.task, "lac"))
            kind, what = f"query.{CALIBRATION}", "calibration counts"
            total: Calibration | None = self._total(kind, CalibrateRequest, what, held, content, like)
            if total is not None:
                total.threshold(LEVEL)
        except DataError as error:
            log.warning("there are no prediction sets: %s", error)
            return None
        except ConsilienceError as error:
            log.warning("sites cannot calibrate prediction sets: %s", error)
            return None
        return total

    def _sums(self, theta: Tensor, request: StatisticsRequest, total: Sums | None) -> Iterator[Sums]:
        like = template_sums(self.task, theta, self.federation)
        further = {} if total is None else {"total": pack(to(total, "cpu"))}

        def content(name: str, secure: SecurePart | None = None) -> Any:
            own = request.model_copy(update={"secure": secure})
            return encode(own, weights=pack(Point(theta.cpu())), **further)

        entries = max(1, math.ceil(float(like.count.max())))
        kind, what = f"query.{STATISTICS}", "statistics of BatchNorm layers"
        found = self._total(kind, StatisticsRequest, what, self._held("examples"), content, like, entries)
        if found is not None:
            yield to(found, self.task.device)
