"""What clients and server send in a secure sum, beside the masked vectors. All of it is public but the shares."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MOST = 200  # clients of a sum: keys and shares of all pairs pass through the server


def _hex(size: int) -> object:
    return Field(pattern=f"^[0-9a-f]{{{2 * size}}}$")


Name = Annotated[str, Field(min_length=1, max_length=200)]
Key = Annotated[str, _hex(32)]
"""32 bytes in hexadecimal: a public key, or a digest."""
Blob = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=8192)]
"""Up to 4,096 bytes in hexadecimal: a certificate, a signature, sealed shares."""
Names = Annotated[list[Name], Field(max_length=MOST)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Terms(_Part):
    """What a sum is of, and who makes it: public, and the same for all its clients. `purpose` and `attempt` make it
    different from every other sum of the experiment; `layout` is the digest of the encoding, and `asked` that of what
    all clients are asked. A server that asked one client something else could tell its vector from the sum."""

    experiment: str = Field(pattern=r"^[0-9a-f]{16}$")
    purpose: Name
    attempt: Name
    layout: Key
    asked: Key

    @property
    def id(self) -> bytes:
        """A hash of the terms."""
        return digest(self.experiment, self.purpose, self.attempt, self.layout, self.asked)


class Advert(_Part):
    """A client's public keys in one sum: c encrypts shares, s makes masks; and its commitment SHA-256(b) to the seed of
    its own mask, all signed with the key of its certificate."""

    name: Name
    c: Key
    s: Key
    commitment: Key
    certificate: Blob
    signature: Blob = ""

    def signed(self, terms: Terms) -> bytes:
        """The bytes that the client signs."""
        return digest("keys", terms.id.hex(), self.name, self.c, self.s, self.commitment)


class Shares(_Part):
    """The shares of its two secrets that a client seals for each of the others, by their names."""

    sealed: Annotated[dict[Name, Blob], Field(max_length=MOST)]


class Opened(_Part):
    """The shares by which a client lets the server open the sum: of the seeds of the clients whose vectors arrived, and
    of the mask keys of those whose vectors did not."""

    seeds: Annotated[dict[Name, Blob], Field(max_length=MOST)]
    keys: Annotated[dict[Name, Blob], Field(max_length=MOST)]


def arrivals(terms: Terms, arrived: Sequence[str]) -> bytes:
    """The bytes that every client signs: whose vectors arrived."""
    return digest("arrived", terms.id.hex(), *sorted(arrived))


def digest(*words: str) -> bytes:
    """A hash of words, and of where each ends."""
    return hashlib.sha256(json.dumps(words).encode()).digest()
