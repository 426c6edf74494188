"""Learning curves."""

from collections.abc import Sequence

from consilience.core import text
from consilience.metrics import Directions, spread
from consilience.report.drawing.charts import Line, curves
from consilience.report.page import Key, Plot, Section
from consilience.report.sections.words import AVERAGE, KINDS, POINT, Runs, better, method_key, own_directions
from consilience.runs.stored import RunFiles

TITLE = "Learning curves"
USUAL = {"round", "seconds", "clients", "loss", "bytes_down", "bytes_up"}  # numbers of a round that other sections show


def run_curves(run: RunFiles, metrics: Sequence[str] | None = None) -> Section:
    """Metrics by round, all scores by default: of the point model, and dashed of the posterior average."""
    scores, plots, averaged = run.curve_names(), [], False
    for metric in scores if metrics is None else metrics:
        kinds = ["line"] if metric == "loss" or metric not in scores else list(KINDS)
        points = [(colour, kind, *run.curve(metric, kind)) for colour, kind in enumerate(kinds)]
        lines = [Line(x, y, colour, dashed=kind == "marginal") for colour, kind, x, y in points if x]
        averaged |= any(line.dashed for line in lines)
        if lines:
            drawing = curves(_title(metric), lines, mark=run.switch.get("at"))
            caption = _caption(metric, run.directions) if metric in scores else "After each round."
            plots.append(Plot(drawing, caption))
    legend = [Key(POINT, "s0"), Key(AVERAGE, "s1", "dashed")] if averaged else []
    about = f"The dotted line marks the last round of {run.switch['first']['name']}." if run.switch else ""
    return Section(TITLE, about, legend=legend, plots=plots)


def comparison_curves(runs: Runs, metrics: Sequence[str] | None = None) -> Section:
    """Metrics by round: the mean over seeds of each method, in a band from lowest to highest."""
    everything = [run for group in runs.values() for run in group]
    if metrics is None:
        metrics = text.in_order(name for run in everything for name in run.curve_names())
    plots, averaged = [], False
    for metric in metrics:
        drawn = [
            _mean_curve(group, metric, kind, colour)
            for colour, group in enumerate(runs.values())
            for kind in (KINDS if metric != "loss" else ["point"])
        ]
        lines = [line for line in drawn if line]
        averaged |= any(line.dashed for line in lines)
        if lines:
            plots.append(Plot(curves(_title(metric), lines), _caption(metric, own_directions(runs))))
    dashes = f" Solid lines: {POINT}. Dashed lines: {AVERAGE}." if averaged else ""
    several = len(everything) > len(runs)
    band = "Lines are means over seeds; bands reach from the lowest to the highest seed." if several else ""
    legend = [method_key(method, colour) for colour, (method, group) in enumerate(runs.items()) if group]
    return Section(TITLE, f"{band}{dashes}".strip(), legend=legend, plots=plots)


def _mean_curve(group: Sequence[RunFiles], metric: str, kind: str, colour: int) -> Line | None:
    """The mean over a method's runs, with the lowest and the highest for the point model."""
    by_round: dict[int, list[float]] = {}
    for run in group:
        for at, value in zip(*run.curve(metric, kind), strict=True):
            by_round.setdefault(at, []).append(value)
    if not by_round:
        return None
    rounds = sorted(by_round)
    values = [by_round[at] for at in rounds]
    means = [spread(found)[0] for found in values]
    band = any(len(found) > 1 for found in values) and kind == "point"
    low, high = ([min(found) for found in values], [max(found) for found in values]) if band else (None, None)
    return Line(rounds, means, colour, kind == "marginal", low, high)


def _title(metric: str) -> str:
    return "Training loss" if metric == "loss" else text.long(metric)


def _caption(metric: str, own: Directions) -> str:
    if metric == "loss":
        return "Mean over the training examples of each round's clients. Less is better."
    return f"{better(metric, own)} On the test data after each round.".strip()


def server_section(run: RunFiles) -> Section:
    """Numbers that the method reports of each round: a curve, or a fact if they do not change."""
    own = dict.fromkeys(name for line in run.rounds for name in line if name not in USUAL)
    values = {name: run.curve(name, "line")[1] for name in own}
    constant = [name for name, found in values.items() if len(set(found)) == 1]
    plots = run_curves(run, [name for name in own if name not in constant]).plots
    return Section("Server", facts=[(text.long(name), text.number(values[name][0])) for name in constant], plots=plots)
