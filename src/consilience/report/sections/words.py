"""Words and types that several sections share."""

from collections.abc import Mapping, Sequence

from consilience.core import text
from consilience.metrics import MARGINAL, NO_OWN, Directions, direction
from consilience.report.drawing.canvas import SERIES, swatch
from consilience.report.page import Key, Table
from consilience.runs.stored import RunFiles

POINT, AVERAGE = "point model", "posterior average"
KINDS = {"point": POINT, "marginal": AVERAGE}
ENSEMBLE = {"point": "ensemble"}

Runs = Mapping[str, Sequence[RunFiles]]
Folded = list[tuple[str, str | Table]]


def kinds(run: RunFiles) -> dict[str, str]:
    """The predictors of a run: the mean weights and the posterior average, or an ensemble."""
    return ENSEMBLE if run.evaluation.get("belief") == "Mixture" else KINDS


def better(metric: str, own: Directions = NO_OWN) -> str:
    """Which direction is better; empty if neither is."""
    return {1: "More is better.", -1: "Less is better.", 0: ""}[direction(metric, own)]


def own_directions(runs: Runs) -> Directions:
    """The directions of own metrics in all runs."""
    return {name: way for group in runs.values() for run in group for name, way in run.directions.items()}


def metric_name(metric: str, name: str = "") -> str:
    """A metric's short name, or `name`, with "marginal" if it is of the posterior average."""
    name = name or text.short(metric.removesuffix(MARGINAL))
    return f"{name}, marginal" if metric.endswith(MARGINAL) else name


def method_key(method: str, index: int) -> Key:
    """A method in a legend; lines are dotted where colours repeat."""
    return Key(method, swatch(index), "solid" if index < len(SERIES) else "dotted")
