"""A client's answers under secure aggregation: the same computations, sent as masked vectors."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from consilience.algorithms.base import Algorithm
from consilience.algorithms.switch import phases
from consilience.core.records import Tree, rows, stack, to
from consilience.engines.work import Share
from consilience.flower.client import FlowerClient, LostStateError
from consilience.flower.contribution import Contribution
from consilience.flower.messages import (
    BeliefRequest,
    CalibrateRequest,
    EvaluateRequest,
    MaskedReply,
    Request,
    SecurePart,
    StatisticsRequest,
    TrainRequest,
    asked,
)
from consilience.flower.policy import SiteError
from consilience.flower.secure_scores import sums_of
from consilience.flower.secure_site import SecureSite, encoding_of
from consilience.flower.storage import Result
from consilience.flower.updates import with_limited_weights

log = logging.getLogger("consilience")
Masked = tuple[MaskedReply, bytes | None]


@dataclass(frozen=True)
class MaskedAnswers:
    """The answers of `client`, masked by `site`. The server sees no answer of one client, so the client itself refuses
    an update that the server would refuse: it withholds it, and keeps the state that it had."""

    client: FlowerClient
    site: SecureSite

    def train(self, request: TrainRequest, records: dict[str, bytes]) -> Masked:
        """The masked update of a round."""
        purpose = f"round {request.round} of stage {request.stage}"

        def answer(part: SecurePart) -> Tree:
            done = self.client.storage(request.experiment).read(request.token)
            if done is not None:
                return done[0].update
            before = self.client.state(request, records)
            share = self.client.share(request, records)
            if request.leaving:
                share = self._farewell(share, before, request)
            contribution, after = self._judged(share, request, part)
            self.client.store(request, Result(contribution, before if after is None else after))
            return contribution

        return self._masked(request, records, purpose, answer)

    def evaluate(self, request: EvaluateRequest, records: dict[str, bytes]) -> Masked:
        """The masked sums of scores."""
        return self._about_belief("scores", request, records, lambda: sums_of(*self.client.scores(request, records)))

    def calibrate(self, request: CalibrateRequest, records: dict[str, bytes]) -> Masked:
        """The masked counts of calibration scores."""
        return self._about_belief("counts", request, records, lambda: self.client.calibrate(request, records))

    def statistics(self, request: StatisticsRequest, records: dict[str, bytes]) -> Masked:
        """The masked sums of BatchNorm layers."""
        return self._about_belief("statistics", request, records, lambda: self.client.statistics(request, records))

    def _about_belief(
        self,
        kind: str,
        request: BeliefRequest | StatisticsRequest,
        records: dict[str, bytes],
        answer: Callable[[], Tree],
    ) -> Masked:
        """The masked answer to a question about a belief. Its purpose is the same for the same belief, whatever the
        server calls it."""
        parts = [request.fingerprint.encode(), *(records[name] for name in sorted(records))]
        digests = (hashlib.sha256(part).hexdigest() for part in parts)
        purpose = f"{kind} {hashlib.sha256(''.join(digests).encode()).hexdigest()}"
        return self._masked(request, records, purpose, lambda part: answer())

    def _masked(
        self, request: Request, records: dict[str, bytes], purpose: str, answer: Callable[[SecurePart], Tree]
    ) -> Masked:
        part = request.secure
        assert part is not None
        try:
            theirs = getattr(request, "fingerprint", self.client.fingerprint)
            if theirs != self.client.fingerprint:
                raise SiteError(self.client.disagreement(theirs))
            if asked(request, records) != part.terms.asked:
                raise SiteError("the server asks this site for something else than the other sites of the sum")
            return MaskedReply(status="done"), self.site.masked(part, purpose, lambda: answer(part))
        except LostStateError as error:
            return MaskedReply(status="lost", reason=str(error)), None

    def _farewell(self, share: Share, before: Tree, request: TrainRequest) -> Share:
        """The share of a client whose update takes its part out of the server's state."""
        log.warning("round %d: the server forgets this site, which takes its part out", request.round)
        update = self._algorithm(request).farewell(before)
        return replace(share, update=rows(update, 0), states=before, rejected={})

    def _algorithm(self, request: TrainRequest) -> Algorithm:
        return phases(self.client.method)[request.stage].algorithm

    def _judged(self, share: Share, request: TrainRequest, part: SecurePart) -> tuple[Contribution, Tree]:
        """(contribution, new state with a client axis); the state is None if the client withholds its update."""
        update, n = to(share.update, "cpu"), self.client.examples
        counted = min(n, part.counted)
        update, _ = with_limited_weights(update, update, counted, of=n)
        reason = share.rejected.get(request.client, "")
        if not reason and not request.leaving:
            reason = self._algorithm(request).objection(share.measures)
        if not reason:
            notes, guards = self.client.told(share, summed=True)
            found = Contribution.of(update, notes, counted, guards)
            reason = encoding_of(found, part).beyond(stack([found])).get(0, "")
            if not reason:
                return found, share.states
        log.warning("round %d: this site adds nothing to the sum: %s", request.round, reason)
        return Contribution.withheld(update, share.notes), None
