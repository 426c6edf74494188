"""Sums that the server learns without learning any addend: fixed point, masks, and the protocol."""

from consilience.secure.fixed import Encoding, Fold

__all__ = ["Encoding", "Fold"]
