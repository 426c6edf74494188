"""Several runs: compare, tune, distil."""

from consilience.core.ranges import Choice, Range
from consilience.studies.compare import Comparison, Setting, compare
from consilience.studies.distil import distil
from consilience.studies.tune import tune

__all__ = ["Choice", "Comparison", "Range", "Setting", "compare", "distil", "tune"]
