"""Secure sums of sites' answers: the server's side of the five steps, over Flower."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field

import numpy as np
import torch
from flwr.app import RecordDict

from consilience.core.errors import RecordError
from consilience.core.records import Tree, unpack
from consilience.flower.coordinator import Coordinator
from consilience.flower.messages import (
    SECURE,
    MaskedReply,
    Request,
    SecurePart,
    SecureReply,
    SecureRequest,
    asked,
    decode,
    encode,
    longest_record,
)
from consilience.secure.client import FEWEST, default_threshold
from consilience.secure.fixed import REACH, Encoding
from consilience.secure.messages import MOST, Opened, Terms
from consilience.secure.server import SecureSum

STEP = 120.0  # seconds of a step in which sites compute nothing but keys and shares

Content = Callable[[str, SecurePart | None], RecordDict]
"""A function of a site's name and its secure part that returns the request for its answer."""


@dataclass
class Outcome:
    """The result of one secure sum: the sum of the contributions of the sites in `arrived`, or None with a `reason`.

    `failures` says why other sites are not in it, and `lost` are those of them that have lost their states. `spent`
    says that sites may have opened the sum, so that they answer the same request among no others. `bytes_up` are those
    of the masked vectors."""

    total: Tree = None
    arrived: list[str] = field(default_factory=list)
    reason: str = ""
    failures: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    spent: bool = False
    bytes_up: int = 0


@dataclass(frozen=True)
class SecureSums:
    """Makes secure sums among the sites that `coordinator` knows, in an `experiment`."""

    coordinator: Coordinator
    experiment: str

    def sum(
        self,
        kind: str,
        request: type[Request],
        purpose: str,
        names: Iterable[str],
        content: Content,
        encoding: Encoding,
        *,
        largest: int,
        examples: int,
        reach: float = REACH,
        attempt: str,
    ) -> Outcome:
        """The sum of the answers of these sites to requests of this `kind` and type. `encoding` is that of a
        contribution, which follows from `largest`, `examples` and `reach`. Sites that do not answer a step are left out
        from there on."""
        outcome, names = Outcome(), sorted(names)
        alike = asked(*decode(content(names[0], None), request))
        terms = Terms(experiment=self.experiment, purpose=purpose, attempt=attempt, layout=encoding.digest, asked=alike)
        total = self._agreed(terms, names, outcome)
        if total is None:
            return outcome
        part = SecurePart(
            terms=terms, clients=encoding.clients, largest=largest, examples=examples, counted=largest, reach=reach
        )

        def masked(name: str) -> RecordDict:
            return content(name, part.model_copy(update={"sealed": total.shares_for(name)}))

        self._collect(kind, total, masked, encoding, outcome)
        if not _enough(outcome, total.arrived, default_threshold(len(total.adverts)), "sent a masked vector"):
            return outcome
        opened = self._opened(terms, total, outcome)
        if not opened:
            return outcome
        try:
            integers = encoding.unflatten(torch.from_numpy(total.open(opened).view(np.int64)))
            encoding.check_sum(integers)
        except RecordError as error:
            outcome.reason = str(error)
            return outcome
        outcome.total, outcome.arrived = encoding.decode(integers), sorted(total.arrived)
        return outcome

    def _agreed(self, terms: Terms, names: list[str], outcome: Outcome) -> SecureSum | None:
        """The sum after its sites have agreed on keys and sent their shares; None if there are too few."""
        if len(names) > MOST:
            raise RecordError(f"{len(names)} sites would take part, and a secure sum has at most {MOST}: set a cohort")
        found = self._step(SecureRequest(step="keys", terms=terms), names, outcome)
        adverts = {name: reply.advert for name, reply in found if reply.advert and reply.advert.name == name}
        if not _enough(outcome, adverts, FEWEST, "sent keys"):
            return None
        total = SecureSum(terms, [*adverts.values()])
        request = SecureRequest(step="shares", terms=terms, adverts=total.adverts)
        for name, reply in self._step(request, adverts, outcome):
            try:
                if reply.shares is None:
                    raise RecordError("its reply has no shares")
                total.take_shares(name, reply.shares)
            except RecordError as error:
                outcome.failures[name] = str(error)
        return total if _enough(outcome, total.shares, default_threshold(len(adverts)), "sent shares") else None

    def _collect(
        self, kind: str, total: SecureSum, content: Callable[[str], RecordDict], encoding: Encoding, outcome: Outcome
    ) -> None:
        """Add the masked vectors as they arrive."""
        like = torch.zeros(encoding.numbers, dtype=torch.int64)
        longest = longest_record(like)
        for name, reply in self.coordinator.ask(
            kind, sorted(total.shares), content, self.coordinator.participation.timeout, longest
        ):
            try:
                answer, records = decode(reply, MaskedReply, longest)
                if answer.status == "lost":
                    outcome.lost.append(name)
                if answer.status != "done" or "masked" not in records:
                    raise RecordError(answer.reason or "its reply has no masked vector")
                total.add(name, unpack(records["masked"], like=like).numpy().view(np.uint64))
                outcome.bytes_up += 8 * encoding.numbers
            except RecordError as error:
                outcome.failures[name] = str(error)

    def _opened(self, terms: Terms, total: SecureSum, outcome: Outcome) -> dict[str, Opened]:
        """The shares by which sites open the sum; none if too few sites do."""
        arrived = sorted(total.arrived)
        signatures: dict[str, str] = {}
        for name, reply in self._step(SecureRequest(step="arrived", terms=terms, arrived=arrived), arrived, outcome):
            if reply.spent:
                outcome.spent = True
                outcome.failures[name] = "it has let this answer be opened among other sites"
            elif reply.signature:
                signatures[name] = reply.signature
        least = default_threshold(len(total.adverts))
        if not _enough(outcome, signatures, least, "signed the list of sites"):
            return {}
        outcome.spent = True  # from here on, whatever is lost
        opened: dict[str, Opened] = {}
        request = SecureRequest(step="open", terms=terms, signatures=signatures)
        for name, reply in self._step(request, signatures, outcome):
            try:
                if reply.opened is None:
                    raise RecordError("its reply has no shares that open the sum")
                total.check_opened(reply.opened)
                opened[name] = reply.opened
            except RecordError as error:
                outcome.failures[name] = str(error)
        return opened if _enough(outcome, opened, least, "opened the sum") else {}

    def _step(
        self, request: SecureRequest, names: Iterable[str], outcome: Outcome
    ) -> Iterator[tuple[str, SecureReply]]:
        """The valid replies to a step; why the others are missing goes to the outcome."""
        content = encode(request.model_copy(update={"preparation": self.coordinator.preparation}))
        seconds = min(STEP, self.coordinator.participation.timeout)
        for name, reply in self.coordinator.ask(f"query.{SECURE}", sorted(names), lambda name: content, seconds):
            try:
                yield name, decode(reply, SecureReply)[0]
            except RecordError as error:
                outcome.failures[name] = str(error)


def _enough(outcome: Outcome, found: Sized, least: int, what: str) -> bool:
    """Whether as many sites as a sum needs have taken a step; if not, the reason why no site's answer counts. A site
    may ask for more than `least`."""
    if len(found) < least:
        outcome.reason = f"{len(found)} sites have {what}, and a secure sum of these sites needs {least}"
    return len(found) >= least
