"""Engines run algorithms: they know records, not methods."""

from consilience.engines.distributed import Distributed
from consilience.engines.plan import Plan
from consilience.engines.simulator import Simulator

__all__ = ["Distributed", "Plan", "Simulator"]
