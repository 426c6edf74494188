"""Tests of a finished run against the theory of its method."""

from consilience.diagnostics import ode

__all__ = ["ode"]
