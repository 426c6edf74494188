"""Figures of runs and comparisons for notebooks and papers: those of the report, one by one.

cs.plot(run).curves("accuracy", "nll")
cs.plot(run).reliability().save("calibration.pdf")
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from consilience.core import text
from consilience.core.errors import ConfigError, nearest
from consilience.evaluation.scores import Evaluation
from consilience.metrics import MARGINAL
from consilience.report.drawing.charts import dots
from consilience.report.figure import Figure
from consilience.report.page import Key, Plot, Section
from consilience.report.sections.clients import client_plot
from consilience.report.sections.curves import comparison_curves, run_curves
from consilience.report.sections.federation import communication_section, data_section
from consilience.report.sections.uncertainty import run_calibration
from consilience.report.sections.words import AVERAGE, POINT, Runs
from consilience.runs.stored import RunFiles

__all__ = ["ComparisonPlots", "RunPlots"]

CURVES = "Scores on the test data after each round; the training loss is that of the round's clients."
DEVIATION = "Bars are ± one standard deviation."


def _figure(section: Section, otherwise: str, caption: str = "") -> Figure:
    """The plots of a section as one figure, with their captions, or with `caption` if there are several."""
    if not section.plots:
        raise ConfigError(otherwise)
    several = len(section.plots) > 1
    captions = [f"{plot.drawing.title}: {plot.caption}" if several else plot.caption for plot in section.plots]
    shown = caption if caption and several else " ".join(captions)
    drawings = tuple(plot.drawing for plot in section.plots)
    return Figure(section.title, drawings, tuple(section.legend), shown)


def _chosen(metrics: Sequence[str], known: Iterable[str], what: str) -> list[str]:
    found = text.in_order(known)
    for metric in metrics:
        if metric not in found:
            raise ConfigError(f"there is no {what} of {metric!r}; {nearest(metric, found)}")
    return list(metrics) or found


class RunPlots:
    """`plot(run)`: the figures of a run. `files(evaluated)` returns the contents of its directory; with
    `evaluated=True`, including a final evaluation."""

    def __init__(self, files: Callable[[bool], RunFiles]) -> None:
        self._files = files

    def __repr__(self) -> str:
        return "plot(run): curves(*metrics), reliability(), labels(), clients(metric), communication()"

    def curves(self, *metrics: str) -> Figure:
        """Metrics by round, all scores if none is named: of the point model, and dashed of the posterior average."""
        run = self._files(False)
        if not run.rounds:
            raise ConfigError("there are no curves: the run has no rounds yet")
        own = {name for line in run.rounds for name, value in line.items() if text.is_number(value)} - {"round"}
        chosen = _chosen(metrics, [*run.curve_names(), *own], "curve") if metrics else None
        return _figure(run_curves(run, chosen), "there are no curves: no round has a finite value", CURVES)

    def reliability(self, evaluation: Evaluation | None = None) -> Figure:
        """Accuracy by confidence, of the last evaluation by default."""
        section = run_calibration(self._evaluated(evaluation))
        return _figure(section, "there is no reliability diagram: only classifiers have one")

    def labels(self) -> Figure:
        """The examples of each client, by class."""
        return _figure(data_section(self._files(False)), "the run does not record the clients' examples")

    def clients(self, metric: str | None = None, evaluation: Evaluation | None = None) -> Figure:
        """A score at each client, accuracy if there is one: of the last evaluation by default."""
        rows = self._evaluated(evaluation).evaluation.get("clients") or []
        if not rows:
            raise ConfigError("there are no clients' scores: evaluate the run on a Federation")
        asked = [] if metric is None else [metric]
        chosen = _chosen(asked, [name for row in rows for name in row["metrics"]], "score")[0]
        values = {("", str(row["name"])): row["metrics"].get(chosen) for row in rows}
        found = {key: (value, None) for key, value in values.items() if text.is_number(value)}
        plot = client_plot(chosen, found, [name for _, name in values], [""], self._files(False).directions)
        return _figure(Section("Scores at each client", plots=[plot]), "there are no clients' scores")

    def communication(self) -> Figure:
        """Bytes sent, by round."""
        return _figure(communication_section(self._files(False)), "nothing has been sent: there are no rounds")

    def _evaluated(self, evaluation: Evaluation | None) -> RunFiles:
        run = self._files(evaluation is None)
        found = run.evaluation if evaluation is None else evaluation.to_json()
        if not found:
            raise ConfigError("the run was not evaluated: give fit test data, or this figure an evaluation")
        return replace(run, evaluation=found)


class ComparisonPlots:
    """`plot(comparison)`: the figures of a comparison. `stored` reads the runs of each method, if they were kept."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], stored: Callable[[], Runs]) -> None:
        self._rows, self._stored = rows, stored

    def __repr__(self) -> str:
        return "plot(comparison): curves(*metrics), results(*metrics)"

    def curves(self, *metrics: str) -> Figure:
        """Metrics by round, all if none is named: the mean over seeds of each method, in a band from lowest to highest,
        and dashed of the posterior average. Needs the runs' directories."""
        runs = self._stored()
        known = [name for group in runs.values() for run in group for name in run.curve_names()]
        section = comparison_curves(runs, _chosen(metrics, known, "curve"))
        plots = [replace(plot, caption=f"{plot.caption} {section.text}".strip()) for plot in section.plots]
        return _figure(replace(section, plots=plots), "the runs have no curves", f"{CURVES} {section.text}".strip())

    def results(self, *metrics: str) -> Figure:
        """Each method's score with ± one standard deviation over seeds, and the paper's."""
        methods = list(dict.fromkeys(str(row["method"]) for row in self._rows))
        plots: list[Plot] = []
        shown: set[str] = set()
        for metric in _chosen(metrics, [str(row["metric"]).removesuffix(MARGINAL) for row in self._rows], "result"):
            groups = self._groups(metric)
            shown |= {name for name, points in groups.items() if points}
            points = [[found.get(method) for method in methods] for found in groups.values()]
            plots.append(Plot(dots(text.long(metric), methods, points), DEVIATION))
        legend = [Key(name, f"s{colour}") for colour, name in enumerate((POINT, AVERAGE, "paper")) if name in shown]
        section = Section("Results", legend=legend if len(legend) > 1 else [], plots=plots)
        return _figure(section, "the comparison has no results", DEVIATION)

    def _groups(self, metric: str) -> dict[str, dict[str, tuple[float, float]]]:
        """Mean and standard deviation by method: of the point model, the posterior average and the paper."""
        found: dict[str, dict[str, tuple[float, float]]] = {POINT: {}, AVERAGE: {}, "paper": {}}
        for row in self._rows:
            name, method = str(row["metric"]), str(row["method"])
            if name.removesuffix(MARGINAL) != metric:
                continue
            if text.is_number(row["mean"]):
                found[AVERAGE if name.endswith(MARGINAL) else POINT][method] = (row["mean"], row["std"] or 0.0)
            if text.is_number(row["paper"]):
                found["paper"][method] = (row["paper"], 0.0)
        return found
