"""Reliability diagrams."""

from __future__ import annotations

from functools import reduce
from operator import add

from consilience.metrics import Reliability
from consilience.report.drawing.charts import reliability
from consilience.report.page import Plot, Section
from consilience.report.sections.words import Runs, kinds
from consilience.runs.stored import RunFiles

ABOUT = "A calibrated model lies on the diagonal: of its predictions with confidence 0.8, 80 % are right."


def run_calibration(run: RunFiles) -> Section:
    """A reliability diagram for each predictor of the final model."""
    plots = []
    for colour, (kind, name) in enumerate(kinds(run).items()):
        diagram = run.diagram(kind)
        if diagram and sum(diagram.count):
            plots.append(Plot(reliability(name.capitalize(), diagram, colour), _caption(diagram)))
    return Section("Calibration", ABOUT, plots=plots)


def comparison_calibration(runs: Runs) -> Section:
    """A reliability diagram for each method, of the predictions of all its seeds."""
    plots = []
    for colour, (method, group) in enumerate(runs.items()):
        kind = "marginal" if any(run.diagram("marginal") for run in group) else "point"
        diagrams = [diagram for run in group if (diagram := run.diagram(kind)) and sum(diagram.count)]
        if diagrams:
            pooled = reduce(add, diagrams)
            caption = f"{kinds(group[0])[kind].capitalize()}. {_caption(pooled)}"
            plots.append(Plot(reliability(method, pooled, colour), caption))
    return Section("Calibration", f"{ABOUT} A diagram has all seeds of a method.", plots=plots)


def _caption(diagram: Reliability) -> str:
    """The verdict, and what the diagram counts."""
    total = sum(diagram.count)
    rows = zip(diagram.count, diagram.confidence, diagram.accuracy, strict=True)
    gap = sum(count * (confidence - accuracy) for count, confidence, accuracy in rows) / total
    verdict = "Mean confidence equals accuracy."
    if abs(gap) >= 0.0005:
        word, side = ("Overconfident", "above") if gap > 0 else ("Underconfident", "below")
        verdict = f"{word}: mean confidence is {abs(gap):.3f} {side} accuracy."
    return f"{verdict} {total:,} predictions; the lower bars are their shares in the bins."
