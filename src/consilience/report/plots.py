"""Figures of runs and comparisons for notebooks and papers: those of the report, one by one.

cs.plot(run).curves("accuracy", "nll")
cs.plot(run).reliability().save("calibration.pdf")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from matplotlib import figure as canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from consilience.core import text
from consilience.core.errors import ConfigError, nearest
from consilience.core.files import write_atomically
from consilience.evaluation.scores import Evaluation
from consilience.metrics import MARGINAL
from consilience.report import comparison as comparisons
from consilience.report import figures
from consilience.report import run as runs
from consilience.report.page import Key, Plot, Section
from consilience.runs.stored import RunFiles

__all__ = ["ComparisonPlots", "Figure", "RunPlots"]

COLUMNS = 3
CURVES = "Scores on the test data after the round; the training loss is that of the round's clients."
BANDS = "Lines are means over seeds, bands go from the lowest to the highest; dashed, posterior averages."
DEVIATION = "A line is ± one standard deviation."
FORMATS = ("svg", "png", "pdf")
LETTER, SWATCH, LEGEND_LINE = 0.085, 0.55, 0.24  # inches


@dataclass(frozen=True)
class Figure:
    """A figure that a notebook shows, and that can be saved. Its colours are those of a light page."""

    title: str
    drawings: tuple[figures.Drawing, ...]
    legend: tuple[Key, ...] = ()
    caption: str = ""

    @cached_property
    def svg(self) -> str:
        """The figure as SVG, which needs nothing around it. A notebook asks for it twice."""
        return self._render("svg").decode()

    def save(self, path: str | Path) -> Path:
        """Write the figure as SVG, PNG or PDF, by the ending of `path`."""
        path = Path(path)
        kind = path.suffix.lower().removeprefix(".")
        if kind not in FORMATS:
            raise ConfigError(f"a figure is saved as {', '.join(f'.{name}' for name in FORMATS)}, not as {path.name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self._render(kind))
        return path

    def __repr__(self) -> str:
        return f"Figure({self.title!r})"

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        below = f'<figcaption style="font-size: 0.85em">{escape(self.caption)}</figcaption>' if self.caption else ""
        return f'<figure style="margin: 0">{self.svg}{below}</figure>'

    def _render(self, kind: str) -> bytes:
        rows, columns = self._grid
        width = columns * max(drawing.size[0] for drawing in self.drawings)
        height = rows * max(drawing.size[1] for drawing in self.drawings)
        entries = max(1, int(width / max((_length(key) for key in self.legend), default=width)))
        height += LEGEND_LINE * math.ceil(len(self.legend) / entries)

        def paint(figure: canvas.Figure) -> None:
            several = len(self.drawings) > 1
            parts = figure.subfigures(rows, columns, squeeze=False).flat if several else [figure]
            for part, drawing in zip(parts, self.drawings, strict=False):
                drawing.paint(part)
            if self.legend:
                style: dict[str, Any] = {"frameon": False, "labelcolor": figures.INK, "handlelength": 1.6}
                figure.legend(
                    handles=[_handle(key) for key in self.legend], loc="outside lower left", ncols=entries, **style
                )

        return figures.render(self.title, (width, height), paint, kind)

    @property
    def _grid(self) -> tuple[int, int]:
        columns = min(len(self.drawings), COLUMNS)
        return math.ceil(len(self.drawings) / columns), columns


def _length(key: Key) -> float:
    return SWATCH + LETTER * len(key.label)


def _handle(key: Key) -> Any:
    colour = figures.named(key.colour)
    if key.colour.startswith("k"):
        return Patch(facecolor=colour, label=key.label)
    style: Any = {"linestyle": key.style}
    return Line2D([], [], color=colour, label=key.label, **style)


def _figure(title: str, section: Section, otherwise: str, several: str = "") -> Figure:
    """The plots of a report's section as one figure, with one caption for `several` or that of each; without any, an
    error that says why."""
    found = [(plot.svg, plot.caption) for plot in section.plots if isinstance(plot.svg, figures.Drawing)]
    if not found:
        raise ConfigError(otherwise)
    captions = [c if len(found) == 1 else f"{drawing.heading}: {c}" for drawing, c in found]
    caption = several if several and len(found) > 1 else " ".join(captions)
    return Figure(title, tuple(drawing for drawing, _ in found), tuple(section.legend), caption)


def _chosen(metrics: Sequence[str], known: Iterable[str], what: str) -> list[str]:
    """The metrics asked for, or all."""
    found = text.in_order(known)
    for metric in metrics:
        if metric not in found:
            raise ConfigError(f"there is no {what} of {metric!r}; {nearest(metric, found)}")
    return list(metrics) or found


class RunPlots:
    """`plot(run)`: the figures of a run. `files(evaluated)` is what its directory holds or would hold, with a final
    evaluation where one is asked for."""

    def __init__(self, files: Callable[[bool], RunFiles]) -> None:
        self._files = files

    def __repr__(self) -> str:
        return "plot(run): curves(*metrics), reliability(), labels(), clients(metric), communication()"

    def curves(self, *metrics: str) -> Figure:
        """Metrics by round, all when none is named: of the point model, and dashed of the posterior average."""
        run = self._files(False)
        if not run.rounds:
            raise ConfigError("there are no curves: the run has no rounds yet")
        own = {name for line in run.rounds for name, value in line.items() if text.is_number(value)} - {"round"}
        scores = run.curve_names()
        chosen = _chosen(metrics, [*scores, *own], "curve") if metrics else scores
        plots, both = [], False
        for metric in chosen:
            kinds = ["line"] if metric not in scores or metric == "loss" else list(runs.KINDS)
            points = [(colour, kind, *run.curve(metric, kind)) for colour, kind in enumerate(kinds)]
            lines = [figures.Line(x, y, colour, dashed=kind == "marginal") for colour, kind, x, y in points if x]
            both |= len(lines) > 1
            if lines:
                svg = figures.curves(text.long(metric), lines, mark=run.switch.get("at"))
                plots.append(Plot(svg, runs.curve_caption(metric) if metric in scores else "Of every round."))
        legend = [Key(runs.KINDS["point"], "s0"), Key(runs.KINDS["marginal"], "s1", "dashed")] if both else []
        section = Section("Learning curves", legend=legend, plots=plots)
        return _figure("Learning curves", section, "there are no curves: no round has a finite value", CURVES)

    def reliability(self, evaluation: Evaluation | None = None) -> Figure:
        """How often predictions of a given confidence are right: of the last evaluation, or of another one."""
        section = runs.calibration_section(self._evaluated(evaluation))
        return _figure("Calibration", section, "there is no reliability diagram: only classifiers have one")

    def labels(self) -> Figure:
        """Who holds what."""
        return _figure("Who holds what", runs.data_section(self._files(False)), "the run does not say who holds what")

    def clients(self, metric: str | None = None, evaluation: Evaluation | None = None) -> Figure:
        """A score at each client, accuracy if there is one: of the last evaluation, or of another one."""
        rows = self._evaluated(evaluation).evaluation.get("clients") or []
        if not rows:
            raise ConfigError("there are no clients' scores: evaluate the run on a Federation")
        asked = [] if metric is None else [metric]
        chosen = _chosen(asked, [name for row in rows for name in row["metrics"]], "score")[0]
        shown = [{**row, "client": row["name"], "mean": row["metrics"].get(chosen)} for row in rows]
        shown = [{"method": "", "metric": chosen, **row} for row in shown]
        section = comparisons.client_section(shown, [""])
        plots = [Plot(plot.svg, _dots_caption(len(rows))) for plot in section.plots]
        return _figure("At each client", Section("", plots=plots), "there are no clients' scores")

    def communication(self) -> Figure:
        """Bytes sent so far, by round."""
        return _figure(
            "Communication",
            runs.communication_section(self._files(False)),
            "nothing has been sent: there are no rounds",
        )

    def _evaluated(self, evaluation: Evaluation | None) -> RunFiles:
        run = self._files(evaluation is None)
        found = run.evaluation if evaluation is None else evaluation.to_json()
        if not found:
            raise ConfigError("the run was not evaluated: give fit test data, or this figure an evaluation")
        return RunFiles(run.config, run.rounds, found)


def _dots_caption(count: int) -> str:
    cut = f" The first {comparisons.MAX_DRAWN} of {count:,} are drawn." if count > comparisons.MAX_DRAWN else ""
    return f"A row is a client.{cut}"


class ComparisonPlots:
    """`plot(comparison)`: the figures of a comparison. `stored` reads the runs of each method, if they were kept."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], stored: Callable[[], comparisons.Runs]) -> None:
        self._rows, self._stored = rows, stored

    def __repr__(self) -> str:
        return "plot(comparison): curves(*metrics), results(*metrics)"

    def curves(self, *metrics: str) -> Figure:
        """Metrics by round, all when none is named: the mean over seeds of each method, in a band from lowest to
        highest, and dashed of the posterior average. Needs the runs' directories."""
        found = self._stored()
        known = [name for group in found.values() for run in group for name in run.curve_names()]
        plots = []
        for metric in _chosen(metrics, known, "curve"):
            drawn = [
                comparisons.mean_curve(group, metric, kind, colour)
                for colour, group in enumerate(found.values())
                for kind in (runs.KINDS if metric != "loss" else ["point"])
            ]
            lines = [line for line in drawn if line]
            if lines:
                plots.append(Plot(figures.curves(text.long(metric), lines), f"{runs.curve_caption(metric)} {BANDS}"))
        legend = [comparisons.key(method, colour) for colour, (method, group) in enumerate(found.items()) if group]
        return _figure(
            "Learning curves", Section("", legend=legend, plots=plots), "the runs have no curves", f"{CURVES} {BANDS}"
        )

    def results(self, *metrics: str) -> Figure:
        """Each method's score with ± one standard deviation over seeds, beside the paper's where it has one."""
        methods = list(dict.fromkeys(str(row["method"]) for row in self._rows))
        plots: list[Plot] = []
        shown: set[str] = set()
        for metric in _chosen(metrics, [str(row["metric"]).removesuffix(MARGINAL) for row in self._rows], "result"):
            groups = self._groups(metric)
            shown |= {name for name, points in groups.items() if points}
            points = [[found.get(method) for method in methods] for found in groups.values()]
            plots.append(Plot(figures.dots(text.long(metric), methods, points), DEVIATION))
        names = ["point model", "posterior average", "paper"]
        legend = [Key(name, f"s{colour}") for colour, name in enumerate(names) if name in shown]
        section = Section("", legend=legend if len(legend) > 1 else [], plots=plots)
        return _figure("Results", section, "the comparison has no results", DEVIATION)

    def _groups(self, metric: str) -> dict[str, dict[str, tuple[float, float]]]:
        found: dict[str, dict[str, tuple[float, float]]] = {"point model": {}, "posterior average": {}, "paper": {}}
        for row in self._rows:
            name, method = str(row["metric"]), str(row["method"])
            if name.removesuffix(MARGINAL) != metric:
                continue
            kind = "posterior average" if name.endswith(MARGINAL) else "point model"
            if text.is_number(row["mean"]):
                found[kind][method] = (row["mean"], row["std"] or 0.0)
            if text.is_number(row["paper"]):
                found["paper"][method] = (row["paper"], 0.0)
        return found
