"""Sums that the server learns without learning any addend: fixed point, masks, and the protocol.

`client` and `server` have the protocol. They need the package cryptography, and engines do without it."""

from consilience.secure.fixed import REACH, Encoding, Fold

__all__ = ["REACH", "Encoding", "Fold"]
