"""Scores at each client, and how much they differ."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from consilience.core import text
from consilience.metrics import NO_OWN, Directions, direction
from consilience.report.drawing.canvas import swatch
from consilience.report.drawing.charts import dots
from consilience.report.drawing.rows import Spread, spreads
from consilience.report.page import Cell, Plot, Section, Table
from consilience.report.sections.sets import SETS
from consilience.report.sections.words import Folded, Runs, better, method_key
from consilience.runs.stored import RunFiles

MAX_DRAWN = 24
MAX_LISTED = 1000
MAX_FAIRNESS_FIGURES = 2
Scores = dict[str, dict[str, list[list[float]]]]  # metric → method → one list of clients' scores a seed


def run_clients(run: RunFiles) -> Section:
    """A table of the clients' scores."""
    clients = run.evaluation.get("clients") or []
    if not clients:
        return Section("Clients")
    scored = (metric for row in clients for metric in row.get("metrics") or {})
    metrics = [metric for metric in text.in_order(scored) if metric not in SETS]
    column = {metric: [(row.get("metrics") or {}).get(metric) for row in clients] for metric in metrics}
    places = {metric: text.decimals(column[metric]) for metric in metrics}
    baseline = any(text.is_number(client.get("majority")) for client in clients)
    rows = [
        [
            Cell(str(client.get("name", index))),
            Cell.of(client.get("examples"), 0),
            *([Cell.of(client.get("majority"), 3)] if baseline else []),
            *(_score(client, metric, column[metric][index], places[metric]) for metric in metrics),
        ]
        for index, client in enumerate(clients[:MAX_LISTED])
    ]
    cut = f" The table has the first {MAX_LISTED:,} of them." if len(clients) > MAX_LISTED else ""
    caption = f"The final model on the data of {text.plural(len(clients), 'client')}.{cut} Click a heading to sort."
    level = run.evaluation.get("level")
    caption += f" Brackets: {level:.0%} confidence intervals." if level else ""
    caption += " Majority: the accuracy of the most frequent class of the client's training data." if baseline else ""
    head = ["client", "test examples", *(["majority"] if baseline else []), *map(text.short, metrics)]
    return Section("Clients", tables=[Table(head, rows, caption)])


def _score(client: Mapping[str, Any], metric: str, value: Any, places: int) -> Cell:
    """A score with its interval."""
    ends = (client.get("intervals") or {}).get(metric)
    if not ends:
        return Cell.of(value, places)
    return Cell.of(value, min(3, places), spread=text.interval(ends))


def comparison_clients(rows: Sequence[dict[str, Any]], methods: Sequence[str], ways: Directions = NO_OWN) -> Section:
    """Each metric at each client: dots with their spread, and the same numbers as a table."""
    clients = list(dict.fromkeys(str(row["client"]) for row in rows))
    plots: list[Plot] = []
    folded: Folded = []
    for metric in text.in_order(str(row["metric"]) for row in rows):
        found = {
            (str(row["method"]), str(row["client"])): (row["mean"], row.get("std"))
            for row in rows
            if row["metric"] == metric and text.is_number(row.get("mean"))
        }
        plots.append(client_plot(metric, found, clients, methods, ways))
        folded.append((f"{text.long(metric)} as a table", _client_table(found, clients, methods)))
    legend = [method_key(method, colour) for colour, method in enumerate(methods)]
    return Section("Scores at each client", legend=legend, plots=plots, folded=folded)


def client_facts(runs: Runs) -> Section:
    """Each client's test examples and majority baseline, means over the seeds of the method with the most clients."""
    most = max(runs.values(), default=[], key=lambda group: max((_clients(run) for run in group), default=0))
    found: dict[str, list[tuple[float, float | None]]] = {}
    for run in most:
        for client in run.evaluation.get("clients") or []:
            found.setdefault(str(client["name"]), []).append((client["examples"], client.get("majority")))
    rows, baseline = [], any(share is not None for seeds in found.values() for _, share in seeds)
    for name, seeds in list(found.items())[:MAX_LISTED]:
        shares = [share for _, share in seeds if share is not None]
        cells = [Cell.of(float(np.mean(shares)), 3) if shares else Cell(text.NONE)] if baseline else []
        rows.append([Cell(name), Cell.of(float(np.mean([size for size, _ in seeds])), 0), *cells])
    head = ["client", "test examples", *(["majority baseline"] if baseline else [])]
    about = "Majority baseline: the accuracy of the most frequent class of the client's training data."
    return Section(
        "Test data", about if baseline else "", tables=[Table(head, rows, "Means over seeds.")] if rows else []
    )


def _clients(run: RunFiles) -> int:
    return int(run.part("federation").get("clients") or 0)


Found = Mapping[tuple[str, str], tuple[float, float | None]]  # (method, client) → mean, standard deviation


def client_plot(
    metric: str, found: Found, clients: Sequence[str], methods: Sequence[str], ways: Directions = NO_OWN
) -> Plot:
    """A row for each client, with a dot for each method."""
    points: list[list[tuple[float, float] | None]] = []
    for method in methods:
        values = [found.get((method, client)) for client in clients[:MAX_DRAWN]]
        points.append([value and (value[0], value[1] or 0.0) for value in values])
    cut = f" The first {MAX_DRAWN} of {len(clients):,} clients are drawn." if len(clients) > MAX_DRAWN else ""
    seeds = any(std is not None for _, std in found.values())
    bars = " Bars are ± one standard deviation over seeds." if seeds else ""
    caption = f"{better(metric, ways)} A row is a client{', a dot a method' if len(methods) > 1 else ''}.{bars}{cut}"
    return Plot(dots(text.long(metric), clients[:MAX_DRAWN], points), caption.strip())


def _client_table(found: Found, clients: Sequence[str], methods: Sequence[str]) -> Table:
    places = text.decimals(mean for mean, _ in found.values())
    rows = []
    for client in clients:
        cells = [Cell(client)]
        for method in methods:
            mean, std = found.get((method, client), (None, None))
            around = f"± {text.fixed(std, places)}" if text.is_number(std) else ""
            cells.append(Cell.of(mean, places, spread=around))
        rows.append(cells)
    return Table(["client", *methods], rows)


def fairness_section(
    runs: Runs, rows: Sequence[dict[str, Any]], methods: Sequence[str], ways: Directions = NO_OWN
) -> Section:
    """How much scores differ between the clients of one seed, averaged over seeds."""
    scores = _scores_of_runs(runs) or _scores_of_means(rows)
    plots: list[Plot] = []
    tables: list[Table] = []
    folded: Folded = []
    for metric in text.in_order(scores):
        by_method = {method: scores[metric][method] for method in methods if method in scores[metric]}
        way = direction(metric, ways)
        if not way or not any(len(seed) > 1 for seeds in by_method.values() for seed in seeds):
            continue
        found = {method: _summary(seeds, way) for method, seeds in by_method.items()}
        if len(plots) < MAX_FAIRNESS_FIGURES:
            plots.append(_fairness_plot(metric, by_method, found, better(metric, ways)))
        table = _fairness_table(metric, found, methods, way)
        if tables:
            folded.append((text.long(metric), table))
        else:
            tables.append(table)
    about = (
        "How well the model serves each client, which an average does not show. A pale dot is a client of one seed. "
        "The line reaches from the worst client to the best; its thick part, from the 10th to the 90th percentile. The "
        "large dot is the median."
    )
    return Section("Fairness", about, plots=plots, tables=tables, folded=folded)


def _scores_of_runs(runs: Runs) -> Scores:
    scores: Scores = {}
    for method, group in runs.items():
        for run in group:
            clients = [client.get("metrics") or {} for client in run.evaluation.get("clients") or []]
            for metric in dict.fromkeys(name for client in clients for name in client):
                values = [client[metric] for client in clients if text.is_number(client.get(metric))]
                if values:
                    scores.setdefault(metric, {}).setdefault(method, []).append(values)
    return scores


def _scores_of_means(rows: Sequence[dict[str, Any]]) -> Scores:
    """The clients' means over seeds, for comparisons whose runs were not kept."""
    scores: Scores = {}
    for row in rows:
        if text.is_number(row.get("mean")):
            by_method = scores.setdefault(str(row["metric"]), {})
            by_method.setdefault(str(row["method"]), [[]])[0].append(row["mean"])
    return scores


def _summary(seeds: Sequence[Sequence[float]], way: int) -> dict[str, float]:
    """Quantiles from the worst client to the best, and the standard deviation over clients: means over seeds."""
    columns = []
    for values in seeds:
        quantiles = np.quantile(values, [0, 0.1, 0.5, 0.9, 1])
        std = np.std(values, ddof=1) if len(values) > 1 else 0.0
        columns.append([*(quantiles if way > 0 else quantiles[::-1]), std])
    names = ("worst", "tenth", "median", "ninetieth", "best", "std")
    return dict(zip(names, np.mean(columns, axis=0).tolist(), strict=True))


def _fairness_table(metric: str, found: Mapping[str, dict[str, float]], methods: Sequence[str], way: int) -> Table:
    tenth = "10th percentile" if way > 0 else "90th percentile"
    head = {"worst": "worst client", "tenth": tenth, "median": "median", "best": "best client", "std": "std. deviation"}
    places = min(3, text.decimals(value for values in found.values() for value in values.values()))
    best = {}  # as shown, unless all methods are equal
    for name in head:
        choose = max if way > 0 and name != "std" else min
        if len({text.fixed(row[name], places) for row in found.values()}) > 1:
            best[name] = text.fixed(choose(row[name] for row in found.values()), places)
    rows = []
    for method, row in found.items():
        cells = [Cell.of(row[name], places, best=text.fixed(row[name], places) == best.get(name)) for name in head]
        rows.append([Cell(method, swatch=swatch(methods.index(method))), *cells])
    caption = (
        f"{better(metric, {metric: way})} {text.long(metric)} over clients, mean over seeds. Bold: fairest or best."
    )
    return Table(["method", *head.values()], rows, caption)


def _fairness_plot(
    metric: str,
    by_method: Mapping[str, Sequence[Sequence[float]]],
    found: Mapping[str, dict[str, float]],
    caption: str,
) -> Plot:
    rows = []
    for method, seeds in by_method.items():
        row = found[method]
        clients = [value for values in seeds for value in values]
        rows.append(Spread(method, row["worst"], (row["tenth"], row["ninetieth"]), row["median"], row["best"], clients))
    return Plot(spreads(text.long(metric), rows), caption)
