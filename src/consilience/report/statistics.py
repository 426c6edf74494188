"""Sections of a comparison that weigh methods against each other: fairness, differences, tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from consilience.core import text
from consilience.metrics import MARGINAL, direction
from consilience.report.figures import clip, swatch
from consilience.report.page import Cell, Plot, Section, Table
from consilience.report.run import BETTER
from consilience.report.strips import Spread, forest, spreads
from consilience.runs.stored import RunFiles

MAX_FIGURES = 2
Scores = dict[str, dict[str, list[list[float]]]]  # metric → method → one list of clients' scores a seed


def fairness_section(
    runs: Mapping[str, Sequence[RunFiles]], rows: Sequence[dict[str, Any]], methods: Sequence[str]
) -> Section:
    """How differently a method treats its clients: within every seed, then averaged over seeds."""
    scores = scores_of_runs(runs) or scores_of_means(rows)
    plots: list[Plot] = []
    tables: list[Table] = []
    folded: list[tuple[str, str | Table]] = []
    for metric in text.in_order(scores):
        by_method = {method: scores[metric][method] for method in methods if method in scores[metric]}
        if not direction(metric) or not any(len(seed) > 1 for seeds in by_method.values() for seed in seeds):
            continue
        found = {method: summary(seeds, direction(metric)) for method, seeds in by_method.items()}
        table = fairness_table(metric, found, methods)
        if len(plots) < MAX_FIGURES:
            plots.append(Plot(fairness_figure(metric, by_method, found), _reading(metric)))
        if tables:
            folded.append((text.long(metric), table))
        else:
            tables.append(table)
    about = (
        "What the average hides: how well the model serves each client. Pale dots are clients, of all seeds; the line "
        "goes from the worst to the best, its thick part from the 10th to the 90th percentile; the large dot is the "
        "median."
    )
    return Section("Fairness", about, plots=plots, tables=tables, folded=folded)


def scores_of_runs(runs: Mapping[str, Sequence[RunFiles]]) -> Scores:
    """The clients' scores of every run that is still there."""
    scores: Scores = {}
    for method, group in runs.items():
        for run in group:
            clients = [client.get("metrics") or {} for client in run.evaluation.get("clients") or []]
            for metric in dict.fromkeys(name for client in clients for name in client):
                values = [client[metric] for client in clients if text.is_number(client.get(metric))]
                if values:
                    scores.setdefault(metric, {}).setdefault(method, []).append(values)
    return scores


def scores_of_means(rows: Sequence[dict[str, Any]]) -> Scores:
    """The clients' means over seeds, where no more is known."""
    scores: Scores = {}
    for row in rows:
        if text.is_number(row.get("mean")):
            by_method = scores.setdefault(str(row["metric"]), {})
            by_method.setdefault(str(row["method"]), [[]])[0].append(row["mean"])
    return scores


def summary(seeds: Sequence[Sequence[float]], way: int) -> dict[str, float]:
    """Worst, the tenth next to it, median, best and standard deviation over clients, each the mean over seeds."""
    columns = []
    for values in seeds:
        low, tenth, middle, ninetieth, high = np.quantile(values, [0, 0.1, 0.5, 0.9, 1])
        ends = (low, tenth, middle, ninetieth, high) if way > 0 else (high, ninetieth, middle, tenth, low)
        columns.append([*ends, np.std(values, ddof=1) if len(values) > 1 else 0.0])
    names = ("worst", "tenth", "median", "ninetieth", "best", "std")
    return dict(zip(names, np.mean(columns, axis=0).tolist(), strict=True))


def fairness_table(metric: str, found: Mapping[str, dict[str, float]], methods: Sequence[str]) -> Table:
    """A row a method."""
    way = direction(metric)
    tenth = "10th percentile" if way > 0 else "90th percentile"
    head = {"worst": "worst client", "tenth": tenth, "median": "median", "best": "best client", "std": "std. deviation"}
    places = min(3, text.decimals(value for values in found.values() for value in values.values()))
    rivals = {name: {text.fixed(row[name], places) for row in found.values()} for name in head}
    best = {}
    for name in head:
        values = [row[name] for row in found.values()]
        best[name] = text.fixed(max(values) if way > 0 and name != "std" else min(values), places)
    rows = []
    for method, row in found.items():
        cells = [Cell(method, swatch=swatch(methods.index(method)))]
        for name in head:
            shown = text.fixed(row[name], places)
            cells.append(Cell(shown, sort=row[name], best=len(rivals[name]) > 1 and shown == best[name]))
        rows.append(cells)
    caption = f"{text.long(metric)} over clients, mean over seeds; {BETTER[way]}. Bold: fairest or best."
    return Table(["method", *head.values()], rows, caption)


def fairness_figure(
    metric: str, by_method: Mapping[str, Sequence[Sequence[float]]], found: Mapping[str, dict[str, float]]
) -> str:
    """A row a method."""
    rows = []
    for method, seeds in by_method.items():
        row = found[method]
        clients = [value for values in seeds for value in values]
        rows.append(Spread(method, row["worst"], (row["tenth"], row["ninetieth"]), row["median"], row["best"], clients))
    return spreads(text.long(metric), rows)


def difference_section(entries: Sequence[dict[str, Any]], methods: Sequence[str]) -> Section:
    """Methods against each other on the same seeds, with 95 % intervals."""
    entries = [entry for entry in entries if text.is_number(entry.get("difference"))]
    by_metric: dict[str, list[dict[str, Any]]] = {}
    for metric in text.in_order(str(entry.get("metric", "")) for entry in entries):
        by_metric[metric] = [entry for entry in entries if str(entry.get("metric", "")) == metric]
    plots = [Plot(difference_figure(metric, rows, methods), _reading(metric)) for metric, rows in by_metric.items()]
    rows = [difference_row(entry, group) for group in by_metric.values() for entry in group]
    caption = (
        "Difference of the means over the same seeds, its 95 % interval and p-value. Bold: the interval leaves out 0."
    )
    head = ["method", "versus", "metric", "difference", "95 % interval", "p", "seeds"]
    tables = [Table(head, rows, caption)] if rows else []
    about = "Is one method better than another, or was it luck? The first minus the second, with 95 % intervals."
    return Section("Differences", about, plots=plots, tables=tables)


def _reading(metric: str) -> str:
    better = BETTER[direction(metric)]
    return f"{better.capitalize()}." if better else ""


def metric_name(metric: str) -> str:
    """A metric in a table's cell; of the posterior average, it says so."""
    name = text.short(metric.removesuffix(MARGINAL))
    return f"{name}, marginal" if metric.endswith(MARGINAL) else name


def difference_row(entry: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """Difference, interval and p of one pair."""
    low, high, p = (entry[name] if text.is_number(entry.get(name)) else None for name in ("low", "high", "p"))
    places = text.decimals(
        value for other in group for value in (other.get("low"), other["difference"], other.get("high"))
    )
    value, interval, clear = entry["difference"], text.NONE, False
    if low is not None and high is not None:
        interval, clear = f"{signed(low, places)} to {signed(high, places)}", not low <= 0 <= high
    return [
        Cell(str(entry.get("method", ""))),
        Cell(str(entry.get("versus", ""))),
        Cell(metric_name(str(entry.get("metric", "")))),
        Cell(signed(value, places), sort=value, best=clear),
        Cell(interval, sort=sortable(low)),
        Cell(p_value(p), sort=sortable(p)),
        Cell(str(entry.get("n") or ""), sort=sortable(entry.get("n"))),
    ]


def signed(value: float, places: int) -> str:
    """A difference shows its sign."""
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{text.fixed(abs(value), places)}"


def p_value(p: float | None) -> str:
    """As papers write it."""
    return text.NONE if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def difference_figure(metric: str, entries: Sequence[dict[str, Any]], methods: Sequence[str]) -> str:
    """The pairs of one metric as a forest plot, in the first method's colour."""
    rows = []
    for entry in entries:
        method, versus = str(entry.get("method", "")), str(entry.get("versus", ""))
        low, high = (entry[end] if text.is_number(entry.get(end)) else None for end in ("low", "high"))
        colour = methods.index(method) if method in methods else 0
        rows.append((f"{clip(method, 16)} − {clip(versus, 16)}", entry["difference"], low, high, colour))
    title = text.long(metric.removesuffix(MARGINAL))
    return forest(f"{title}, marginal" if metric.endswith(MARGINAL) else title, rows)


def tuning_section(entries: Sequence[dict[str, Any]]) -> Section:
    """What was tried before, and what was chosen."""
    chosen = [
        [
            Cell(str(entry.get("method", ""))),
            Cell(settings(entry.get("chosen")) or "as it is"),
            Cell(score(entry.get("score")), sort=sortable(entry.get("score"))),
            Cell(text.short(str(entry.get("metric", "")))),
            Cell(str(trials(entry)), sort=trials(entry)),
        ]
        for entry in entries
    ]
    head = ["method", "chosen", "score", "metric", "trials"]
    folded: list[tuple[str, str | Table]] = [("What was chosen", Table(head, chosen))] if chosen else []
    for entry in entries:
        table = trial_table(entry)
        if table.rows:
            folded.append((f"{entry.get('method', '')}: {text.plural(len(table.rows), 'trial')}", table))
    return Section("Tuning", "Settings were chosen before the seeds above were run.", folded=folded)


def trials(entry: Mapping[str, Any]) -> int:
    """How many settings were tried."""
    count = entry.get("trials")
    return count if isinstance(count, int) else len(entry.get("all") or [])


def trial_table(entry: Mapping[str, Any]) -> Table:
    """All settings of one method with their scores; the chosen one is bold."""
    tried: list[dict[str, Any]] = entry.get("all") or []
    paths = list(dict.fromkeys(path for trial in tried for path in trial.get("settings") or {}))
    rows = []
    for number, trial in enumerate(tried, 1):
        found = trial.get("settings") or {}
        value, mine = trial.get("score"), found == (entry.get("chosen") or {})
        cells = [Cell(str(number), sort=number), *(setting_cell(found.get(path)) for path in paths)]
        rows.append([*cells, Cell(score(value), sort=sortable(value), best=mine)])
    return Table(["trial", *paths, metric_name(str(entry.get("metric", "score")))], rows)


def setting_cell(value: Any) -> Cell:
    """A setting as it was written."""
    return Cell(text.NONE if value is None else text.call(value), sort=value if text.is_number(value) else None)


def settings(found: Any) -> str:
    """Settings in one cell."""
    return ", ".join(f"{path} = {text.call(value)}" for path, value in found.items()) if isinstance(found, dict) else ""


def score(value: Any) -> str:
    """A score by itself."""
    return text.fixed(value, 4)


def sortable(value: Any) -> float | str:
    """What a column of numbers sorts by."""
    return value if text.is_number(value) else ""
