"""Engines run algorithms: they know records, not methods."""

from consilience.engines.simulator import Plan, Simulator

__all__ = ["Plan", "Simulator"]
