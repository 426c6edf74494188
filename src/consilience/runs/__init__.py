"""fit, the round loop, run directories and what is made from them."""

from consilience.runs import tracking
from consilience.runs.directory import StoredRun, load_posterior, load_run
from consilience.runs.fit import fit
from consilience.runs.run import Callback, Run

__all__ = ["Callback", "Run", "StoredRun", "fit", "load_posterior", "load_run", "tracking"]
