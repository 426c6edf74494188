"""The report of a comparison: several methods on one federation, over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any
from urllib.parse import quote

from consilience.core import text
from consilience.figures import panels, pictures
from consilience.metrics import MARGINAL, direction, spread
from consilience.report import figures
from consilience.report.page import Cell, Key, Page, Plot, Section, Table
from consilience.report.run import (
    BETTER,
    KINDS,
    algorithm_facts,
    config_blocks,
    curve_caption,
    data_section,
    facts,
    footer,
    kinds,
    reliability_caption,
)
from consilience.report.statistics import difference_section, fairness_section, tuning_section
from consilience.report.uncertainty import entropy_comparison
from consilience.runs.stored import RunFiles, read_json, read_runs

MAX_DRAWN = 24
ARROW = {1: " ↑", -1: " ↓", 0: ""}
Runs = Mapping[str, Sequence[RunFiles]]


def comparison_page(directory: Path) -> Page:
    """The report of the comparison in `directory`."""
    content = read_json(directory / "comparison.json")
    rows, entries, clients = (content.get(key) or [] for key in ("rows", "runs", "per_client"))
    methods = list(dict.fromkeys(str(row["method"]) for row in [*rows, *entries, *clients]))
    runs = read_runs(directory, methods, entries)
    everything = [run for group in runs.values() for run in group]
    # Pooled has put all data into one place: not the federation that the others see.
    first = max(everything, key=lambda run: run.part("federation").get("clients") or 0, default=None)
    sections = [
        result_section(rows, methods, str(content.get("over") or "seeds")),
        difference_section(content.get("paired") or [], methods),
        *(figure_section(figure, methods) for figure in content.get("figures") or []),
        curve_section(runs),
        client_section(clients, methods),
        fairness_section(runs, clients, methods),
        calibration_section(runs),
        entropy_comparison(runs),
        tuning_section(content.get("tuning") or []),
        run_section(directory, entries, methods),
        data_section(first) if first else Section("Data"),
        config_section(runs),
    ]
    took = f" It took {text.duration(content['seconds'])}." if content.get("seconds") else ""
    lead = f"{content.get('text') or ''}{took}".strip()
    title, command = str(content.get("title") or directory.name), str(content.get("command") or "")
    return Page("Comparison", title, lead, [], "", sections, footer(first) if first else "", command)


def key(method: str, index: int) -> Key:
    """A method in a legend; colours come round again as dotted lines."""
    return Key(method, figures.swatch(index), "solid" if index < len(figures.SERIES) else "dotted")


def result_section(rows: Sequence[dict[str, Any]], methods: Sequence[str], over: str) -> Section:
    """Methods × metrics, the best of each metric emphasised, with the paper's figures where there are any. What a
    method predicts by its whole posterior has a line of its own."""
    rows = [_in_own_line(row) for row in rows]
    metrics = text.in_order(str(row["metric"]) for row in rows)
    most = max((row.get("n") or 1 for row in rows), default=1)
    lines = [(method, line) for method in methods for line in (method, f"{method}, marginal")]
    listed = [(method, line) for method, line in lines if any(row["method"] == line for row in rows)]
    names = [line for _, line in listed]
    columns = [
        result_column(metric, [row for row in rows if row["metric"] == metric], names, most) for metric in metrics
    ]
    head = ["method", *(name for heads, _ in columns for name in heads)]
    table = [
        [
            Cell(line, swatch=figures.swatch(methods.index(method))),
            *(cell for _, cells in columns for cell in cells[line]),
        ]
        for method, line in listed
    ]
    caption = result_caption(rows, over, most)
    return Section("Results", tables=[Table(head, table, caption)] if table else [])


def _in_own_line(row: dict[str, Any]) -> dict[str, Any]:
    metric = str(row["metric"])
    if not metric.endswith(MARGINAL):
        return row
    return {**row, "method": f"{row['method']}, marginal", "metric": metric.removesuffix(MARGINAL)}


def result_caption(rows: Sequence[dict[str, Any]], over: str, most: int) -> str:
    """How to read the table."""
    about = f"Mean ± sample standard deviation over {most} {over}." if most > 1 else f"One {over.removesuffix('s')}."
    paper = " In grey, the figures of the paper." if any(row.get("paper") is not None for row in rows) else ""
    return f"{about} Bold: best by its mean, in the direction of the arrow.{paper} Click a heading to sort."


def result_column(
    metric: str, rows: Sequence[dict[str, Any]], methods: Sequence[str], most: int
) -> tuple[list[str], dict[str, list[Cell]]]:
    """The head and cells of one metric: our mean ± spread, over how many runs if not over all (`most`), and the paper's
    figure if any method has one."""
    value = {str(row["method"]): row for row in rows}
    means: list[Any] = [row.get("mean") for row in rows]
    places, way = text.decimals(means), direction(metric)
    numbers = [mean for mean in means if text.is_number(mean)]
    best = text.fixed(max(numbers, key=lambda mean: way * mean), places) if way and len(numbers) > 1 else None
    paper = any(row.get("paper") is not None for row in rows)
    cells = {}
    for method in methods:
        row = value.get(method, {})
        shown = text.fixed(row.get("mean"), places)
        around = f"± {text.fixed(row['std'], places)}" if text.is_number(row.get("std")) else ""
        if 0 < (row.get("n") or 0) < most:  # some runs never got there
            around = f"{around} ({row['n']} of {most})".strip()
        sort = row["mean"] if text.is_number(row.get("mean")) else ""
        cells[method] = [Cell(shown, around, sort, best=shown == best)]
        if paper:
            theirs = row.get("paper")
            sort = theirs if text.is_number(theirs) else ""
            cells[method].append(Cell(text.fixed(theirs, places) if sort != "" else "", sort=sort, quiet=True))
    return [text.short(metric) + ARROW[way], *(["paper"] if paper else [])], cells


def figure_section(content: Mapping[str, Any], methods: Sequence[str]) -> Section:
    """A figure of the experiment's own: pictures, or panels."""
    if "rows" in content:
        shown = pictures.read(content)
        return Section(shown.title, pictures=[shown] if shown.rows else [])
    return panel_section(panels.read(content), methods)


def panel_section(figure: panels.Panels, methods: Sequence[str]) -> Section:
    """Panels, with the methods in them as legend."""
    shown = {curve.label for panel in figure.panels for curve in panel.curves}
    shown |= {mark.label for panel in figure.panels for mark in panel.marks}
    legend = [key(method, colour) for colour, method in enumerate(methods) if method in shown]
    plots = [Plot(figures.side_by_side(figure, methods), figure.caption, wide=True)] if figure.panels else []
    return Section(figure.title, legend=legend, plots=plots)


def curve_section(runs: Runs) -> Section:
    """Every metric by round: the mean over seeds of each method, in a band from lowest to highest."""
    everything = [run for group in runs.values() for run in group]
    plots, averaged = [], False
    for metric in text.in_order(name for run in everything for name in run.curve_names()):
        lines = []
        for colour, group in enumerate(runs.values()):
            for kind in KINDS if metric != "loss" else ["point"]:
                line = mean_curve(group, metric, kind, colour)
                if line:
                    lines.append(line)
                    averaged |= kind == "marginal"
        if lines:
            plots.append(Plot(figures.curves(text.long(metric), lines), curve_caption(metric)))
    dashes = " Solid: point model; dashed: posterior average." if averaged else ""
    band = (
        " Lines are means over seeds, bands go from the lowest to the highest." if len(everything) > len(runs) else ""
    )
    legend = [key(method, colour) for colour, (method, group) in enumerate(runs.items()) if group]
    return Section("Learning curves", f"{band}{dashes}".strip(), legend=legend, plots=plots)


def mean_curve(group: Sequence[RunFiles], metric: str, kind: str, colour: int) -> figures.Line | None:
    """One method's curve: mean, lowest and highest over its runs."""
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
    return figures.Line(rounds, means, colour, kind == "marginal", low, high)


def client_section(rows: Sequence[dict[str, Any]], methods: Sequence[str]) -> Section:
    """Each metric at each client: dots with spread, and the same numbers as a table."""
    clients = list(dict.fromkeys(str(row["client"]) for row in rows))
    drawn = clients[:MAX_DRAWN]
    cut = f" The first {MAX_DRAWN} of {len(clients)} clients are drawn." if len(clients) > MAX_DRAWN else ""
    plots: list[Plot] = []
    folded: list[tuple[str, str | Table]] = []
    for metric in text.in_order(str(row["metric"]) for row in rows):
        found = {
            (str(row["method"]), str(row["client"])): (row["mean"], row.get("std"))
            for row in rows
            if row["metric"] == metric and text.is_number(row.get("mean"))
        }
        points = [[point_of(found.get((method, client))) for client in drawn] for method in methods]
        better = BETTER[direction(metric)]
        caption = "A row is a client, a dot a method, a line ± one standard deviation over seeds"
        caption += f"{'; ' + better if better else ''}.{cut}"
        plots.append(Plot(figures.dots(text.long(metric), drawn, points), caption))
        folded.append((f"{text.long(metric)} as a table", client_table(found, clients, methods)))
    legend = [key(method, colour) for colour, method in enumerate(methods)]
    return Section("At each client", legend=legend, plots=plots, folded=folded)


def point_of(value: tuple[float, float | None] | None) -> tuple[float, float] | None:
    """Mean and spread as the figure wants them: one seed has no spread to draw."""
    return None if value is None else (value[0], value[1] or 0.0)


def client_table(
    found: Mapping[tuple[str, str], tuple[float, float | None]], clients: Sequence[str], methods: Sequence[str]
) -> Table:
    """Clients × methods for one metric."""
    places = text.decimals(mean for mean, _ in found.values())
    rows = []
    for client in clients:
        cells = [Cell(client)]
        for method in methods:
            mean, std = found.get((method, client), (None, None))
            around = f"± {text.fixed(std, places)}" if text.is_number(std) else ""
            cells.append(Cell(text.fixed(mean, places), around, "" if mean is None else mean))
        rows.append(cells)
    return Table(["client", *methods], rows)


def calibration_section(runs: Runs) -> Section:
    """A reliability diagram a method, the predictions of all its seeds pooled."""
    plots = []
    for colour, (method, group) in enumerate(runs.items()):
        kind = "marginal" if any(run.diagram("marginal") for run in group) else "point"
        diagrams = [diagram for run in group if (diagram := run.diagram(kind)) and sum(diagram.count)]
        if diagrams:
            pooled = reduce(add, diagrams)
            caption = f"{kinds(group[0])[kind].capitalize()}. {reliability_caption(pooled)}"
            plots.append(Plot(figures.reliability(method, pooled, colour), caption))
    about = "How often predictions made with a given confidence are right; all seeds of a method together."
    return Section("Calibration", about, plots=plots)


def run_section(directory: Path, entries: Sequence[dict[str, Any]], methods: Sequence[str]) -> Section:
    """The single runs, with links to their own reports where they have one."""
    rows = []
    for entry in entries:
        place = str(entry.get("directory", ""))
        linked = (directory / place / "report.html").is_file()
        href = f"./{quote(Path(place).as_posix())}/report.html" if linked else ""
        swatch = figures.swatch(methods.index(str(entry["method"])))
        rows.append(
            [Cell(str(entry["method"]), swatch=swatch), Cell(str(entry.get("seed", ""))), Cell(place, href=href)]
        )
    return Section("Single runs", tables=[Table(["method", "seed", "directory"], rows, prose=True)] if rows else [])


def config_section(runs: Runs) -> Section:
    """Every method with its settings, what all have in common, and run.json of each method's first run."""
    firsts = {method: group[0] for method, group in runs.items() if group}
    calls, shared = [], []
    for method, run in firsts.items():
        found = algorithm_facts(run)
        for label, value in found:  # of a switch, two
            calls.append((method if len(found) == 1 else f"{method}, {label[:1].lower()}{label[1:]}", value))
    for run in list(firsts.values())[:1]:
        count, cohort = run.config.get("rounds"), run.config.get("cohort")
        shared = [("Rounds", f"{count:,}" if count else ""), ("Clients a round", f"{cohort:,}" if cohort else "")]
        shared += [(label, value) for label, value in facts(run) if label == "Task"]
    blocks = [(f"{method}: {name}", block) for method, run in firsts.items() for name, block in config_blocks(run)[:1]]
    return Section("Configuration", facts=[*calls, *(fact for fact in shared if fact[1])], folded=blocks)
