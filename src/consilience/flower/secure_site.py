"""A site's part in secure sums. Every message is answered by a new process, so its state is on the site's disk."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError

from consilience.core.errors import RecordError
from consilience.core.files import private_folder, read_file, write_atomically
from consilience.core.records import Tree, pack
from consilience.flower.messages import Payload, SecurePart, SecureReply, SecureRequest
from consilience.secure.client import Member, default_threshold
from consilience.secure.fixed import Encoding
from consilience.secure.identity import Authority, Identity
from consilience.secure.messages import Names, Terms

MEMBER, MASKED, SENT, LEDGER = "member.json", "masked.safetensors", "sent.json", "opened.json"


class Sent(Payload):
    """What a site has sent in a sum: the digest of the vector without masks; `purpose` is what it answers, in the
    site's own words; and the sites of the sum, once they are known."""

    purpose: str
    vector: str
    arrived: Names = Field(default=[])


_LEDGER = TypeAdapter(list[Sent])


@dataclass(frozen=True)
class SecureSite:
    """Answers the steps of secure sums for one site, and masks its vectors.

    Files are in `folder`: a folder for the present sum, with the site's secrets, and a ledger of the sums that were
    opened. Updates are functions of the round, so the same vector in two sums of different sites would give the others
    away: the site opens a vector once, or again among the same sites. It opens no sum of fewer than `fewest` sites."""

    folder: Path
    identity: Identity
    authority: Authority
    fewest: int = 0

    def answer(self, request: SecureRequest) -> SecureReply:
        """The reply to a step. The same request again gets the same reply."""
        steps: dict[str, Callable[[SecureRequest], SecureReply]] = {
            "keys": self._keys,
            "shares": self._shares,
            "arrived": self._arrived,
            "open": self._open,
        }
        with self._locked():
            if request.step == "keys":
                self._begin(request.terms)
            place, asked = self._place(request.terms), _hash(request.model_dump_json().encode())
            saved = place / f"{request.step}.json"
            if saved.exists():
                known = json.loads(read_file(saved))
                if known["request"] != asked:
                    raise RecordError(f"the step {request.step!r} of a secure sum was asked for twice, and differently")
                return SecureReply.model_validate(known["reply"])
            reply = steps[request.step](request)
            text = {"request": asked, "reply": reply.model_dump(mode="json")}
            write_atomically(saved, json.dumps(text), private=True)
            return reply

    def masked(self, part: SecurePart, purpose: str, answer: Callable[[], Tree]) -> bytes:
        """The packed masked vector of an answer, that of one client without a client axis and within bounds. `purpose`
        names what is answered. The same sum again gets the same vector: two vectors under one mask would be open."""
        place = self._place(part.terms)
        with self._locked():
            if (place / MASKED).exists() and self._member(part.terms).senders:
                return read_file(place / MASKED)
        contribution = answer()
        encoding = encoding_of(contribution, part)
        if encoding.digest != part.terms.layout:
            raise RecordError("its numbers have another layout than the server's; start it with the same app and data")
        vector = encoding.flatten(encoding.encode(contribution)).numpy().view(np.uint64)
        sent = Sent(purpose=purpose, vector=_hash(vector.tobytes()))
        with self._locked():
            member = self._member(part.terms).mask(part.sealed, vector)
            masked = pack(torch.from_numpy(vector.view(np.int64)))
            write_atomically(place / MASKED, masked, private=True)
            write_atomically(place / SENT, sent.model_dump_json(), private=True)
            self._keep(member)
            return masked

    def _keys(self, request: SecureRequest) -> SecureReply:
        member = Member.new(request.terms, self.identity.name)
        self._keep(member)
        return SecureReply(advert=member.advertise(self.identity))

    def _shares(self, request: SecureRequest) -> SecureReply:
        adverts = request.adverts
        threshold = max(default_threshold(len(adverts)), self.fewest)
        member, shares = self._member(request.terms).share(adverts, self.authority, threshold)
        self._keep(member)
        return SecureReply(shares=shares)

    def _arrived(self, request: SecureRequest) -> SecureReply:
        now = self._sent(request.terms, request.arrived)
        for before in self._ledger():
            if before.arrived != now.arrived and (before.purpose == now.purpose or before.vector == now.vector):
                return SecureReply(spent=True)
        member, signature = self._member(request.terms).confirm(request.arrived, self.identity)
        self._keep(member)
        return SecureReply(signature=signature)

    def _open(self, request: SecureRequest) -> SecureReply:
        place = self._place(request.terms)
        member, opened = self._member(request.terms).unmask(request.signatures, self.authority)
        now = self._sent(request.terms, member.arrived)
        ledger = [*(one for one in self._ledger() if one != now), now]
        write_atomically(self.folder / LEDGER, _LEDGER.dump_json(ledger), private=True)  # before the shares are sent
        for name in (MEMBER, MASKED):
            (place / name).unlink()
        return SecureReply(opened=opened)

    def _sent(self, terms: Terms, arrived: list[str]) -> Sent:
        sent = Sent.model_validate_json(read_file(self._place(terms) / SENT))
        return sent.model_copy(update={"arrived": sorted(arrived)})

    def _begin(self, terms: Terms) -> None:
        """Make the folder of a sum, and delete those of others, with their secrets."""
        place = self._place(terms)
        for other in self.folder.iterdir():
            if other.is_dir() and other != place:
                shutil.rmtree(other)
        private_folder(place)

    def _place(self, terms: Terms) -> Path:
        return self.folder / terms.id.hex()[:32]

    def _member(self, terms: Terms) -> Member:
        try:
            member = Member.model_validate_json(read_file(self._place(terms) / MEMBER))
        except (OSError, ValidationError) as error:
            raise RecordError("this site has no part in this sum: it has lost its disk, or opened the sum") from error
        if member.terms != terms:
            raise RecordError("the terms of the sum have changed")
        return member

    def _keep(self, member: Member) -> None:
        write_atomically(self._place(member.terms) / MEMBER, member.model_dump_json(), private=True)

    def _ledger(self) -> list[Sent]:
        path = self.folder / LEDGER
        return _LEDGER.validate_json(read_file(path)) if path.exists() else []

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process of this site at a time."""
        private_folder(self.folder)
        with open(self.folder / "lock", "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def encoding_of(contribution: Tree, part: SecurePart) -> Encoding:
    """The encoding of contributions like this one in a sum."""
    return Encoding.of(
        contribution, clients=part.clients, largest=part.largest, examples=part.examples, reach=part.reach
    )


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
