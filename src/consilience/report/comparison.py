"""The report of a comparison: several methods on one federation, over seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from consilience import figures
from consilience.core import text
from consilience.figures import Pictures
from consilience.report.drawing.canvas import swatch
from consilience.report.drawing.panels import side_by_side
from consilience.report.page import Cell, Page, Plot, Section, Table
from consilience.report.sections.clients import client_facts, comparison_clients, fairness_section
from consilience.report.sections.clinical import coefficient_section
from consilience.report.sections.configuration import comparison_configuration, footer
from consilience.report.sections.curves import comparison_curves
from consilience.report.sections.federation import data_section
from consilience.report.sections.results import difference_section, local_section, result_section, tuning_section
from consilience.report.sections.uncertainty import comparison_calibration, comparison_entropy
from consilience.report.sections.words import method_key, own_directions
from consilience.runs.reading import read_json
from consilience.runs.stored import RunFiles, read_runs


def comparison_page(directory: Path) -> Page:
    """The report of the comparison in `directory`."""
    content = read_json(directory / "comparison.json", "resume the comparison, which writes it again")
    rows, entries, clients = (content.get(key) or [] for key in ("rows", "runs", "per_client"))
    methods = list(dict.fromkeys(str(row["method"]) for row in [*rows, *entries, *clients]))
    runs = read_runs(directory, methods, entries)
    everything = [run for group in runs.values() for run in group]
    # Pooled has one client: take the run with the most clients.
    first = max(everything, key=lambda run: run.part("federation").get("clients") or 0, default=None)
    ways = content.get("directions") or own_directions(runs)
    sections = [
        result_section(rows, methods, str(content.get("over") or "seeds"), ways),
        difference_section(content.get("paired") or [], methods, ways),
        *(_figure_section(figure, methods) for figure in content.get("figures") or []),
        coefficient_section(RunFiles({}, [], {"coefficients": content.get("coefficients")})),
        comparison_curves(runs),
        comparison_clients(clients, methods, ways),
        client_facts(runs),
        local_section(content.get("at_clients") or [], methods, ways),
        fairness_section(runs, clients, methods, ways),
        comparison_calibration(runs),
        comparison_entropy(runs),
        tuning_section(content.get("tuning") or []),
        _run_section(directory, entries, methods),
        data_section(first) if first else Section("Data"),
        comparison_configuration(runs),
    ]
    took = f" It took {text.duration(content['seconds'])}." if content.get("seconds") else ""
    lead = f"{content.get('text') or ''}{took}".strip()
    title, command = str(content.get("title") or directory.name), str(content.get("command") or "")
    return Page("Comparison", title, lead, [], "", sections, footer(first) if first else "", command,
                finding=str(content.get("finding") or ""))  # fmt: skip


def _figure_section(content: Mapping[str, Any], methods: Sequence[str]) -> Section:
    """A figure of the experiment's own: pictures, or panels with their methods as legend."""
    figure = figures.read(content)
    if isinstance(figure, Pictures):
        return Section(figure.title, pictures=[figure] if figure.rows else [])
    labels = {curve.label for panel in figure.panels for curve in panel.curves}
    labels |= {mark.label for panel in figure.panels for mark in panel.marks}
    legend = [method_key(method, colour) for colour, method in enumerate(methods) if method in labels]
    if not figure.panels:
        return Section(figure.title)
    plot = Plot(side_by_side(figure, methods), figure.caption, wide=True, whole=len(figure.panels) == 1)
    return Section(figure.title, legend=legend, plots=[plot])


def _run_section(directory: Path, entries: Sequence[dict[str, Any]], methods: Sequence[str]) -> Section:
    rows = []
    for entry in entries:
        method, place = str(entry["method"]), str(entry.get("directory", ""))
        linked = (directory / place / "report.html").is_file()
        href = f"./{quote(Path(place).as_posix())}/report.html" if linked else ""
        cells = [Cell(method, swatch=swatch(methods.index(method))), Cell(str(entry.get("seed", "")))]
        rows.append([*cells, Cell(place, href=href)])
    return Section("Single runs", tables=[Table(["method", "seed", "directory"], rows, prose=True)] if rows else [])
