"""Records, Gaussians, beliefs, random keys, errors and text: the base of all other packages."""

from consilience.core import keys
from consilience.core.beliefs import Belief, Mixture
from consilience.core.checks import Count, Fraction, NonNegative, Positive, Several, Share, Size, Width, check_types
from consilience.core.errors import ClientError, ConfigError, ConsilienceError, DataError, RecordError, TaskError
from consilience.core.gaussian import Gaussian
from consilience.core.ranges import Choice, Range, Ranges
from consilience.core.records import Addressed, Point, Tree, Weighted, leaves, pack, record, rows, to, tree_map, unpack

__all__ = [
    "Addressed", "Belief", "Choice", "ClientError", "ConfigError", "ConsilienceError", "Count", "DataError", "Fraction",
    "Gaussian", "Mixture", "NonNegative", "Point", "Positive", "Range", "Ranges", "RecordError", "Several", "Share",
    "Size", "TaskError", "Tree", "Weighted", "Width", "check_types", "keys", "leaves", "pack", "record", "rows", "to",
    "tree_map", "unpack",
]  # fmt: skip
