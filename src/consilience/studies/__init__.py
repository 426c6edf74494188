"""Several runs: compare, tune, distil."""

from consilience.core.ranges import Choice, Range
from consilience.studies.beta import fit_beta
from consilience.studies.compare import compare
from consilience.studies.comparison import Comparison
from consilience.studies.distil import distil
from consilience.studies.setting import Setting
from consilience.studies.temperature import Tempered, fit_temperature
from consilience.studies.tune import tune

__all__ = [
    "Choice", "Comparison", "Range", "Setting", "Tempered", "compare", "distil", "fit_beta", "fit_temperature", "tune",
]  # fmt: skip
