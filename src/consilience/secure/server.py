"""The server's part in a secure sum: it forwards keys and shares, adds masked vectors, and opens their sum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from consilience.core.errors import RecordError
from consilience.secure.client import number, pair_mask
from consilience.secure.masks import Vector, add_streams
from consilience.secure.messages import Advert, Opened, Shares, Terms
from consilience.secure.shamir import SHARE, combine


@dataclass
class SecureSum:
    """One sum. The server keeps one vector, to which it adds the masked vectors as they arrive.

    `adverts` are the keys of the clients that take part, `shares` what they have sealed for each other, `arrived` the
    clients whose vectors are in the sum."""

    terms: Terms
    adverts: list[Advert]
    shares: dict[str, Shares] = field(default_factory=dict)
    arrived: list[str] = field(default_factory=list)
    total: Vector | None = None

    def __post_init__(self) -> None:
        self.adverts = sorted(self.adverts, key=lambda one: one.name)

    def take_shares(self, name: str, shares: Shares) -> None:
        """Keep what a client has sealed, if it is for all the others."""
        if {*shares.sealed} != {advert.name for advert in self.adverts} - {name}:
            raise RecordError("its shares are not for the other clients of the sum")
        self.shares[name] = shares

    def shares_for(self, name: str) -> dict[str, str]:
        """The sealed shares for a client, by their senders."""
        return {sender: shares.sealed[name] for sender, shares in self.shares.items() if sender != name}

    def add(self, name: str, masked: Vector) -> None:
        """Add a client's masked vector, which may be overwritten."""
        if name in self.arrived or name not in self.shares:
            raise RecordError("its vector is not one of this sum")
        if self.total is None:
            self.total = masked
        elif len(masked) != len(self.total):
            raise RecordError(f"its vector has {len(masked)} numbers, where {len(self.total)} were expected")
        else:
            np.add(self.total, masked, out=self.total)
        self.arrived.append(name)

    def check_opened(self, opened: Opened) -> None:
        """Raise a RecordError unless a client's shares are those of this sum."""
        lost = {*self.shares} - {*self.arrived}
        if {*opened.seeds} != {*self.arrived} or {*opened.keys} != lost:
            raise RecordError("its shares are not those of the clients of the sum")
        if any(len(share) != 2 * SHARE for share in (*opened.seeds.values(), *opened.keys.values())):
            raise RecordError("its shares have a wrong length")

    def open(self, opened: Mapping[str, Opened]) -> Vector:
        """The sum of all vectors that arrived, from the shares of at least as many clients as their threshold; a
        RecordError if these do not give the secrets of the clients."""
        if self.total is None:
            raise RecordError("no vector has arrived")
        removed: list[tuple[bytes, int]] = []
        for name in self.arrived:
            seed = combine({self._number(sender): bytes.fromhex(one.seeds[name]) for sender, one in opened.items()})
            if hashlib.sha256(seed).hexdigest() != self._advert(name).commitment:
                raise RecordError(f"the shares do not open the mask of {name!r}")
            removed.append((seed, -1))
        for name in self.shares:
            if name not in self.arrived:
                shares = {self._number(sender): bytes.fromhex(one.keys[name]) for sender, one in opened.items()}
                removed += self._masks_left_by(name, combine(shares))
        add_streams(self.total, removed)
        return self.total

    def _masks_left_by(self, name: str, secret: bytes) -> list[tuple[bytes, int]]:
        """The masks that the arrived vectors share with a client that was lost."""
        key, own = X25519PrivateKey.from_private_bytes(secret), self._number(name)
        if key.public_key().public_bytes_raw().hex() != self._advert(name).s:
            raise RecordError(f"the shares do not open the masks of {name!r}")
        # The lost client would have added each with the opposite sign of its peer, so its own sign takes it away.
        return [pair_mask(key, self._advert(peer), self.terms, own, self._number(peer)) for peer in self.arrived]

    def _number(self, name: str) -> int:
        return number(self.adverts, name)

    def _advert(self, name: str) -> Advert:
        return self.adverts[self._number(name) - 1]
