"""fit, the round loop, run directories and what is made from them."""

from consilience.runs import tracking
from consilience.runs.changes import Changes, changes
from consilience.runs.directory import Storage
from consilience.runs.fit import fit
from consilience.runs.run import Callback, Run
from consilience.runs.stored import StoredRun, load_posterior, load_run

__all__ = [
    "Callback", "Changes", "Run", "Storage", "StoredRun", "changes", "fit", "load_posterior", "load_run", "tracking",
]  # fmt: skip
