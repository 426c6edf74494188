"""Does a run do what the theory of its method says? Questions to put to a run when it is over."""

from consilience.diagnostics import ode

__all__ = ["ode"]
