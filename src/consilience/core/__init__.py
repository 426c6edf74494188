"""Records, Gaussians, beliefs, random keys, errors and text: the base of all other packages."""

from consilience.core import keys
from consilience.core.beliefs import Mixture
from consilience.core.errors import ClientError, ConsilienceError
from consilience.core.gaussian import Gaussian
from consilience.core.records import Addressed, Point, Weighted, pack, record, unpack

__all__ = [
    "Addressed", "ClientError", "ConsilienceError", "Gaussian", "Mixture", "Point", "Weighted", "keys", "pack",
    "record", "unpack",
]  # fmt: skip
