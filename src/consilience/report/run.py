"""The report of one run: what was run, on whose data, what came of it, at what cost."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from consilience.core import text
from consilience.metrics import Reliability, direction
from consilience.report import figures
from consilience.report.generated import generated_section
from consilience.report.page import Cell, Key, Link, Page, Plot, Section, Table, Tile
from consilience.report.uncertainty import entropy_section, posterior_section
from consilience.runs.stored import RunFiles, read_json

MAX_DRAWN = 60
MAX_LISTED = 1000
KINDS = {"point": "point model", "marginal": "posterior average"}
ENSEMBLE = {"point": "ensemble"}
BETTER = {1: "more is better", -1: "less is better", 0: ""}
USUAL = {"round", "seconds", "clients", "loss", "bytes_down", "bytes_up"}  # numbers of a round that have their place


def run_page(directory: Path) -> Page:
    """The report of the run in `directory`."""
    run = RunFiles.read(directory)
    data = run.part("federation").get("data", "data")
    sections = [
        curve_section(run),
        generated_section(run),
        calibration_section(run),
        entropy_section(run, kinds(run)),
        client_section(run),
        posterior_section(run),
        server_section(run),
        communication_section(run),
        data_section(run),
        Section("Configuration", facts=facts(run), folded=config_blocks(run)),
    ]
    scores, title = tiles(run), f"{run.method} on {data}"
    averaged = any(tile.note for tile in scores)
    caption = "On the test data: large, averaged over the posterior; small, the point model." if averaged else ""
    return Page("Federated run", title, lead(run), scores, caption, sections, footer(run), up=way_up(directory))


def way_up(directory: Path) -> Link | None:
    """The comparison that a run is part of: method/seed, or kind/method/seed for warm starts."""
    for up in ("../..", "../../.."):
        if (directory.resolve() / up / "comparison.json").is_file():
            title = read_json(directory.resolve() / up / "comparison.json").get("title")
            return Link(str(title or "Comparison"), f"{up}/report.html")
    return None


def kinds(run: RunFiles) -> dict[str, str]:
    """What predicts: the mean weights and the posterior average, or an ensemble."""
    return ENSEMBLE if run.evaluation.get("belief") == "Mixture" else KINDS


def lead(run: RunFiles) -> str:
    """The run in two sentences."""
    fed, done, planned = run.part("federation"), len(run.rounds), run.config.get("rounds") or 0
    sentences = []
    if fed.get("clients"):
        hold = "holds" if fed["clients"] == 1 else "hold"
        split = f" ({fed['how']})" if fed.get("how") else ""
        held = f"{hold} {text.plural(fed.get('examples') or 0, 'example')}{split}"
        sentences.append(f"{text.plural(fed['clients'], 'client')} {held}.")
    rounds = text.plural(done, "round") if done >= planned else f"{done} of {planned:,} rounds"
    cohort = f" with {text.plural(run.config['cohort'], 'client')} each" if run.config.get("cohort") else ""
    seed = f", seed {run.config['seed']}" if "seed" in run.config else ""
    return " ".join([*sentences, f"{rounds}{cohort}{seed}."])


def tiles(run: RunFiles) -> list[Tile]:
    """The final scores; the posterior average leads where there is one."""
    scores = {kind: (run.evaluation.get(kind) or {}).get("metrics") or {} for kind in KINDS}
    if not any(scores.values()):
        last: dict[str, Any] = next((line for line in reversed(run.rounds) if line.get("eval")), {})
        scores = {"point": last.get("eval") or {}, "marginal": last.get("marginal") or {}}
    found = []
    for metric in text.in_order([*scores["marginal"], *scores["point"]])[:6]:
        point, marginal = scores["point"].get(metric), scores["marginal"].get(metric)
        if marginal is None:
            found.append(Tile(text.short(metric), text.number(point)))
        else:
            note = f"{KINDS['point']} {text.number(point)}"
            found.append(Tile(text.short(metric), text.number(marginal), note))
    return found


def facts(run: RunFiles) -> list[tuple[str, str]]:
    """What was run, as label and value."""
    task = run.part("task")
    seconds = sum(line.get("seconds") or 0 for line in run.rounds)
    down, up = (sum(line.get(key) or 0 for line in run.rounds) for key in ("bytes_down", "bytes_up"))
    rows = [
        *algorithm_facts(run),
        (
            "Task",
            f"{task.get('kind', '')}, {text.plural(task.get('parameters') or 0, 'parameter')}" if task else "",
        ),
        ("Engine", str(run.config.get("engine") or "")),
        (
            "Time",
            f"{text.duration(seconds)}, {text.duration(seconds / len(run.rounds))} a round" if seconds else "",
        ),
        ("Traffic", f"{text.data_size(down)} down, {text.data_size(up)} up" if down or up else ""),
    ]
    return [(label, value) for label, value in rows if value]


def algorithm_facts(run: RunFiles) -> list[tuple[str, str]]:
    """The algorithm with its settings; of a switch, both."""
    if run.switch:
        at = run.switch["at"]
        return [
            (f"To round {at:,}", text.call(run.switch["first"])),
            (f"From round {at + 1:,}", text.call(run.switch["then"])),
        ]
    return [("Algorithm", text.call(run.part("algorithm")) if run.part("algorithm") else "")]


def data_facts(run: RunFiles) -> list[tuple[str, str]]:
    """Which data, and how it is shared out."""
    fed = run.part("federation")
    sizes = fed.get("sizes") or []
    between = f"{min(sizes):,} to {max(sizes):,} examples, median {statistics.median(sizes):,.0f}" if sizes else ""
    rows = [
        ("Data", ". ".join(str(fed[key]) for key in ("data", "note") if fed.get(key))),
        ("Split", str(fed.get("how") or "")),
        ("Clients", "; ".join(filter(None, [f"{fed['clients']:,}" if fed.get("clients") else "", between]))),
        ("Examples", f"{fed['examples']:,} for training" if fed.get("examples") else ""),
        ("Of another kind", run.outside),
    ]
    return [(label, value) for label, value in rows if value]


def data_section(run: RunFiles) -> Section:
    """The federation: which data, and who holds what: classes by client, or only sizes where there are no classes."""
    fed, about = run.part("federation"), data_facts(run)
    counts = fed.get("label_counts") or [[size] for size in fed.get("sizes") or []]
    if not counts:
        return Section("Data", facts=about)
    names = labels(fed.get("names"), len(counts))[:MAX_DRAWN]
    classes = labels(fed.get("classes"), len(counts[0]))
    cut = f" The first {MAX_DRAWN} of {len(counts):,} clients are drawn." if len(counts) > MAX_DRAWN else ""
    drawn, wide = counts[:MAX_DRAWN], not figures.is_few(names)
    if len(counts[0]) > len(figures.SHADES):
        svg = figures.heat_map("Examples and their classes", names, classes, drawn)
        largest = max(max(row) / max(sum(row), 1) for row in drawn)
        caption = (
            "A column is a client. The fuller the colour, the larger the share of the class among its examples "
            f"(full colour: {largest:.0%}); grey bars are numbers of examples.{cut}"
        )
        return Section("Data", facts=about, plots=[Plot(svg, caption, wide)])
    svg = figures.stacked_bars("Examples of each client", names, drawn)
    by_class = bool(fed.get("label_counts"))
    legend = [Key(name, f"k{shade}") for shade, name in enumerate(classes)] if by_class else []
    caption = f"A bar is a client, its height the number of its examples{', by class' if by_class else ''}.{cut}"
    return Section("Data", facts=about, legend=legend, plots=[Plot(svg, caption, wide)])


def labels(names: Sequence[Any] | None, count: int) -> list[str]:
    """The names if there is one for each, else numbers."""
    return [str(name) for name in (names if names and len(names) == count else range(count))]


def curve_section(run: RunFiles) -> Section:
    """Every metric by round, of the point model and of the posterior average."""
    plots, kinds = [], set()
    for metric in run.curve_names():
        lines = []
        for colour, kind in enumerate(KINDS if metric != "loss" else ["point"]):
            x, y = run.curve(metric, kind)
            if x:
                lines.append(figures.Line(x, y, colour, dashed=kind == "marginal"))
                kinds.add(kind)
        if lines:
            svg = figures.curves(text.long(metric), lines, mark=run.switch.get("at"))
            plots.append(Plot(svg, curve_caption(metric)))
    both = [Key(KINDS["point"], "s0"), Key(KINDS["marginal"], "s1", "dashed")]
    about = f"The dotted line is the end of {run.switch['first']['name']}." if run.switch else ""
    return Section("Learning curves", about, legend=both if len(kinds) > 1 else [], plots=plots)


def curve_caption(metric: str) -> str:
    """What a curve shows, and which way is better."""
    if metric == "loss":
        return "Mean over the examples of each round's clients, while they train."
    better = BETTER[direction(metric)]
    return f"On the test data after the round{'; ' + better if better else ''}."


def calibration_section(run: RunFiles) -> Section:
    """Reliability diagrams of the final model."""
    plots = []
    for colour, (kind, name) in enumerate(kinds(run).items()):
        diagram = run.diagram(kind)
        if diagram and sum(diagram.count):
            svg = figures.reliability(name.capitalize(), diagram, colour)
            plots.append(Plot(svg, reliability_caption(diagram)))
    return Section("Calibration", "How often predictions made with a given confidence are right.", plots=plots)


def reliability_caption(diagram: Reliability) -> str:
    """What a reliability diagram shows, and which way the model errs."""
    total = sum(diagram.count)
    rows = zip(diagram.count, diagram.confidence, diagram.accuracy, strict=True)
    gap = sum(count * (confidence - accuracy) for count, confidence, accuracy in rows) / total
    lean = "above accuracy, by {:.3f} (overconfident)" if gap > 0 else "below accuracy, by {:.3f} (underconfident)"
    verdict = lean.format(abs(gap)) if abs(gap) >= 0.0005 else "equal to accuracy"
    return f"{total:,} predictions. Mean confidence is {verdict}. Below, the share of predictions in each bin."


def client_section(run: RunFiles) -> Section:
    """A table of the clients' own scores; a click on a column sorts it."""
    clients = run.evaluation.get("clients") or []
    if not clients:
        return Section("Clients")
    metrics = text.in_order(metric for row in clients for metric in row.get("metrics") or {})
    column = {metric: [(row.get("metrics") or {}).get(metric) for row in clients] for metric in metrics}
    places = {metric: text.decimals(column[metric]) for metric in metrics}
    rows = []
    for index, client in enumerate(clients[:MAX_LISTED]):
        size = client.get("examples")
        cells = [Cell(str(client.get("name", index))), Cell(text.fixed(size, 0), sort=size)]
        for metric in metrics:
            value = column[metric][index]
            cells.append(Cell(text.fixed(value, places[metric]), sort=value if text.is_number(value) else ""))
        rows.append(cells)
    cut = f" The first {MAX_LISTED:,} of {len(clients):,} are listed." if len(clients) > MAX_LISTED else ""
    count = text.plural(len(clients), "client")
    caption = f"The final model on the data of each of {count}.{cut} Click a heading to sort."
    return Section("Clients", tables=[Table(["client", "examples", *map(text.short, metrics)], rows, caption)])


def server_section(run: RunFiles) -> Section:
    """Numbers that the method itself reports of every round: a curve, or a fact where they do not change."""
    plots, fixed = [], []
    for name in dict.fromkeys(name for line in run.rounds for name in line if name not in USUAL):
        x, y = run.curve(name, "line")
        if x and len(set(y)) == 1:
            fixed.append((text.long(name), text.number(y[0])))
        elif x:
            plots.append(Plot(figures.curves(text.long(name), [figures.Line(x, y)]), "After every round."))
    return Section("Server", facts=fixed, plots=plots)


def communication_section(run: RunFiles) -> Section:
    """What went over the wire, and who was turned away."""
    rounds = [line["round"] for line in run.rounds]
    sums = [list(accumulate(line.get(key) or 0 for line in run.rounds)) for key in ("bytes_down", "bytes_up")]
    plots = []
    if rounds and (sums[0][-1] or sums[1][-1]):
        lines = [figures.Line(rounds, total, colour, dashed=colour == 1) for colour, total in enumerate(sums)]
        caption = f"In all {text.data_size(sums[0][-1])} to the clients and {text.data_size(sums[1][-1])} back."
        plots.append(Plot(figures.curves("Bytes sent so far", lines, unit="B"), caption))
    tables = [table for table in (rejected_table(run.rounds), guard_table(run.rounds)) if table.rows]
    legend = [Key("to clients", "s0"), Key("from clients", "s1", "dashed")] if plots else []
    return Section("Communication", legend=legend, plots=plots, tables=tables)


def rejected_table(rounds: Sequence[dict[str, Any]]) -> Table:
    """Clients whose updates were not fused, and why."""
    found: dict[tuple[str, str], list[int]] = {}
    for line in rounds:
        for entry in line.get("rejected") or []:
            key = (str(entry.get("client", text.NONE)), str(entry.get("reason", "")))
            found.setdefault(key, []).append(line["round"])
    rows = [
        [
            Cell(client),
            Cell(reason),
            Cell(text.plural(len(at), "time"), sort=len(at)),
            Cell(str(at[-1]), sort=at[-1]),
        ]
        for (client, reason), at in found.items()
    ]
    return Table(["client", "reason", "how often", "last in round"], rows, "Updates that were not fused.", prose=True)


def guard_table(rounds: Sequence[dict[str, Any]]) -> Table:
    """How often a numerical guard had to step in."""
    total: Counter[str] = Counter()
    for line in rounds:
        total.update(line.get("guards") or {})
    rows = [[Cell(name), Cell(f"{count:,}", sort=count)] for name, count in total.items()]
    return Table(["guard", "how often"], rows, "Numerical guards that stepped in.")


def config_blocks(run: RunFiles) -> list[tuple[str, str | Table]]:
    """run.json without its long lists, and the module."""
    short = {**run.config}
    for name, long_keys in {
        "federation": ("names", "sizes", "label_counts", "classes"),
        "task": ("module",),
    }.items():
        if name in short:
            short[name] = {key: value for key, value in run.part(name).items() if key not in long_keys}
    blocks: list[tuple[str, str | Table]] = [("config.toml", run.toml)] if run.toml else []
    blocks.append(("run.json", json.dumps(short, indent=2, ensure_ascii=False)))
    if run.part("task").get("module"):
        blocks.append(("Module", str(run.part("task")["module"])))
    return blocks


def footer(run: RunFiles) -> str:
    """Which software made the numbers."""
    versions = ", ".join(f"{name} {version}" for name, version in run.part("versions").items())
    return f"Made with {versions}." if versions else ""
