"""A client's part in a secure sum: five steps, between which it keeps a state of its own.

The steps are those of Bonawitz et al. (2017), with signed keys: `advertise`, `share`, `mask`, `confirm`, `unmask`. The
server sees the sum of at least `threshold` vectors, or nothing. A step that the server asks for twice with other
contents is refused.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from pydantic import BaseModel, ConfigDict

from consilience.core.errors import RecordError
from consilience.secure.identity import Authority, Identity
from consilience.secure.masks import SHARE, Vector, add_streams, agreed_key, mask_key
from consilience.secure.messages import MOST, Advert, Blob, Key, Names, Opened, Shares, Terms, arrivals
from consilience.secure.shamir import SHARE as LENGTH
from consilience.secure.shamir import split

FEWEST = 3
"""With two clients, each would learn the other's vector from the sum."""


def default_threshold(clients: int) -> int:
    """⌊2n/3⌋ + 1: a server that shows different lists to different clients gets the shares of no client's both
    secrets, unless a third of the clients help it."""
    return 2 * clients // 3 + 1


class Member(BaseModel):
    """A client's own state in one sum: its secrets, and what it has done. It must be kept from everybody else, and
    deleted after the last step."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    terms: Terms
    name: str
    c: Key
    s: Key
    b: Key
    threshold: int = 0
    adverts: list[Advert] = []
    senders: Names = []
    shares: dict[str, Blob] = {}
    """The shares of the senders' secrets that this client holds: of b, then of s."""
    arrived: Names = []
    opened: bool = False

    @classmethod
    def new(cls, terms: Terms, name: str) -> Member:
        """A client with fresh secrets."""
        return cls(terms=terms, name=name, c=secrets.token_hex(32), s=secrets.token_hex(32), b=secrets.token_hex(32))

    def advertise(self, identity: Identity) -> Advert:
        """Step 0: the client's public keys, signed."""
        c, s, commitment = self._public()
        advert = Advert(name=self.name, c=c, s=s, commitment=commitment, certificate=identity.certificate.hex())
        return advert.model_copy(update={"signature": identity.sign(advert.signed(self.terms)).hex()})

    def share(
        self, adverts: Sequence[Advert], authority: Authority, threshold: int | None = None
    ) -> tuple[Member, Shares]:
        """Step 1: the shares of this client's secrets, sealed for each of the others. At least `threshold` clients must
        be in the sum; by default `default_threshold` of those that advertise."""
        threshold = default_threshold(len(adverts)) if threshold is None else threshold
        _check_adverts(self, adverts, authority, threshold)
        if self.threshold:
            raise RecordError("this client has sealed its shares for this sum already")
        member = self.model_copy(update={"adverts": sorted(adverts, key=lambda one: one.name), "threshold": threshold})
        points = range(1, len(adverts) + 1)
        seeds, keys = (split(bytes.fromhex(secret), threshold, points) for secret in (self.b, self.s))
        sealed = {
            peer.name: member._seal(peer, seeds[member._number(peer.name)] + keys[member._number(peer.name)])
            for peer in member.adverts
            if peer.name != self.name
        }
        own = (seeds[member._number(self.name)] + keys[member._number(self.name)]).hex()
        return member.model_copy(update={"shares": {self.name: own}}), Shares(sealed=sealed)

    def mask(self, sealed: Mapping[str, str], vector: Vector) -> Member:
        """Step 2: add this client's masks to `vector` in place. `sealed` are the shares that the other senders have
        sealed for this client, by their names. Two vectors must never get the same masks, so this works once."""
        if not self.threshold or self.senders:
            raise RecordError("a client masks one vector of a sum, after it has sealed its shares")
        senders = sorted({*sealed, self.name})
        self._check_known(senders)
        self._check_enough(len(senders), "have sent shares")
        opened = {name: self._open(self._advert(name), sealed[name]) for name in senders if name != self.name}
        add_streams(vector, [(bytes.fromhex(self.b), 1), *self._pairs(senders)])
        return self.model_copy(update={"senders": senders, "shares": self.shares | opened})

    def _pairs(self, senders: Sequence[str]) -> list[tuple[bytes, int]]:
        """The keys of the masks that this client shares with the other senders, with their signs."""
        me, own = self._number(self.name), _private(self.s)
        return [
            pair_mask(own, self._advert(name), self.terms, me, self._number(name))
            for name in senders
            if name != self.name
        ]

    def confirm(self, arrived: Sequence[str], identity: Identity) -> tuple[Member, str]:
        """Step 3: the signature under the list of the clients whose vectors arrived."""
        if not self.senders:
            raise RecordError("this client has sent no masked vector")
        found = sorted(arrived)
        if self.arrived and self.arrived != found:
            raise RecordError("this client has signed another list of clients for this sum")
        if self.name not in found or len({*found}) < len(found) or not {*found} <= {*self.senders}:
            raise RecordError("the list of clients whose vectors arrived is not one of this sum")
        self._check_enough(len(found), "are in the sum")
        return self.model_copy(update={"arrived": found}), identity.sign(arrivals(self.terms, found)).hex()

    def unmask(self, signatures: Mapping[str, str], authority: Authority) -> tuple[Member, Opened]:
        """Step 4: the shares that open the sum, when at least `threshold` clients have signed the same list. It works
        once. For no client are both of its secrets opened."""
        if not self.arrived or self.opened:
            raise RecordError("a client opens a sum once, after it has signed whose vectors arrived")
        signed = arrivals(self.terms, self.arrived)
        self._check_known(signatures)
        for name, signature in signatures.items():
            certificate = bytes.fromhex(self._advert(name).certificate)
            authority.check(name, certificate, signed, bytes.fromhex(signature))
        self._check_enough(len(signatures), "have signed the list")
        held = {name: bytes.fromhex(share) for name, share in self.shares.items()}
        opened = Opened(
            seeds={name: held[name][:LENGTH].hex() for name in self.arrived},
            keys={name: held[name][LENGTH:].hex() for name in self.senders if name not in self.arrived},
        )
        return self.model_copy(update={"opened": True}), opened

    def _public(self) -> tuple[str, str, str]:
        """The public keys c and s, and the commitment to b."""
        c, s = (_private(key).public_key().public_bytes_raw().hex() for key in (self.c, self.s))
        return c, s, hashlib.sha256(bytes.fromhex(self.b)).hexdigest()

    def _number(self, name: str) -> int:
        return number(self.adverts, name)

    def _advert(self, name: str) -> Advert:
        return self.adverts[self._number(name) - 1]

    def _check_known(self, names: Any) -> None:
        if unknown := {*names} - {advert.name for advert in self.adverts}:
            raise RecordError(f"{', '.join(map(repr, sorted(unknown)))} did not advertise keys for this sum")

    def _check_enough(self, clients: int, what: str) -> None:
        if clients < self.threshold:
            raise RecordError(f"only {clients} clients {what}, and this site opens no sum of fewer than "
                              f"{self.threshold}")  # fmt: skip

    def _seal(self, peer: Advert, share: bytes) -> str:
        return self._cipher(peer, self.name, peer.name).encrypt(
            bytes(12), share, self._context(self.name, peer.name)
        ).hex()  # fmt: skip

    def _open(self, peer: Advert, sealed: str) -> str:
        try:
            share = self._cipher(peer, peer.name, self.name).decrypt(
                bytes(12), bytes.fromhex(sealed), self._context(peer.name, self.name)
            )
        except InvalidTag as error:
            raise RecordError(f"the shares of {peer.name!r} were altered on their way") from error
        if len(share) != 2 * LENGTH:
            raise RecordError(f"the shares of {peer.name!r} have a wrong length")
        return share.hex()

    def _cipher(self, peer: Advert, sender: str, receiver: str) -> ChaCha20Poly1305:
        """The cipher of one message: its key depends on the sum and on the direction, so a constant nonce will do."""
        numbers = self._number(sender), self._number(receiver)
        return ChaCha20Poly1305(agreed_key(_private(self.c), bytes.fromhex(peer.c), self.terms.id, SHARE, *numbers))

    def _context(self, sender: str, receiver: str) -> bytes:
        return self.terms.id + self._number(sender).to_bytes(4, "little") + self._number(receiver).to_bytes(4, "little")


def number(adverts: Sequence[Advert], name: str) -> int:
    """The number of a client in a sum, from 1, in the order of names."""
    return 1 + next(i for i, advert in enumerate(adverts) if advert.name == name)


def pair_mask(own: X25519PrivateKey, peer: Advert, terms: Terms, me: int, other: int) -> tuple[bytes, int]:
    """The key of the mask that two clients share, and the sign with which `me` adds it."""
    return mask_key(own, bytes.fromhex(peer.s), terms.id, me, other), 1 if other > me else -1


def _private(key: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(key))


def _check_adverts(member: Member, adverts: Sequence[Advert], authority: Authority, threshold: int) -> None:
    names, n = {advert.name for advert in adverts}, len(adverts)
    keys = [key for advert in adverts for key in (advert.c, advert.s)]
    own = next((advert for advert in adverts if advert.name == member.name), None)
    if not FEWEST <= n <= MOST:
        raise RecordError(f"{n} clients would take part, and a secure sum needs {FEWEST} to {MOST}")
    if len(names) < n or len({*keys}) < len(keys):
        raise RecordError("two clients of the sum have the same name or the same key")
    if own is None or (own.c, own.s, own.commitment) != member._public():
        raise RecordError("the server has changed this client's own keys")
    if not n // 2 < threshold <= n:
        raise RecordError(
            f"{n} clients would take part, but this site opens sums of at least {threshold} clients, which must be "
            "more than half of them and not more than all"
        )
    for advert in adverts:
        certificate, signature = bytes.fromhex(advert.certificate), bytes.fromhex(advert.signature)
        authority.check(advert.name, certificate, advert.signed(member.terms), signature)
