"""Shamir's secret sharing of 32 bytes, in the field of the prime 2²⁵⁶ + 297."""

import secrets
from collections.abc import Mapping

from consilience.core.errors import RecordError

PRIME = 2**256 + 297
SECRET, SHARE = 32, 33  # bytes of a secret and of a share


def split(secret: bytes, threshold: int, points: range) -> dict[int, bytes]:
    """A share of the secret for each of the `points`, which are positive. `threshold` of them give the secret, and
    fewer say nothing about it."""
    polynomial = [int.from_bytes(secret, "little"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {x: _value(polynomial, x).to_bytes(SHARE, "little") for x in points}


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret, from at least `threshold` shares by their points; a RecordError if the shares give no 32 bytes. From
    fewer or wrong shares the result is another number, so compare it with what is known of the secret."""
    total = 0
    for x, share in shares.items():
        above = below = 1
        for other in shares:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        total += int.from_bytes(share, "little") * above * pow(below, -1, PRIME)
    found = total % PRIME
    if found.bit_length() > 8 * SECRET:
        raise RecordError("the shares give no secret of 32 bytes")
    return found.to_bytes(SECRET, "little")


def _value(polynomial: list[int], x: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % PRIME
    return value
