"""The federation: its data, its traffic, rejected updates and numerical guards."""

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from consilience.core import text
from consilience.report.drawing.canvas import FEW, SHADES
from consilience.report.drawing.charts import Line, curves, heat_map, stacked_bars
from consilience.report.page import Cell, Key, Plot, Section, Table
from consilience.runs.stored import RunFiles

MAX_DRAWN = 60
FIGURE = re.compile(r"\d[\d.e+-]*")


def data_section(run: RunFiles) -> Section:
    """Facts, and a chart of the classes at each client, or of its size if there are no classes."""
    fed, facts = run.part("federation"), _facts(run)
    counts = fed.get("label_counts") or [[size] for size in fed.get("sizes") or []]
    if not counts:
        return Section("Data", facts=facts)
    names = _labels(fed.get("names"), len(counts))[:MAX_DRAWN]
    classes = _labels(fed.get("classes"), len(counts[0]))
    cut = f" The first {MAX_DRAWN} of {len(counts):,} clients are drawn." if len(counts) > MAX_DRAWN else ""
    drawn, wide = counts[:MAX_DRAWN], len(names) > FEW
    if len(counts[0]) > len(SHADES):
        drawing = heat_map("Examples and their classes", names, classes, drawn)
        largest = max(max(row) / max(sum(row), 1) for row in drawn)
        caption = (
            f"A column is a client. Colour is the share of a class among its examples (full colour: {largest:.0%}). "
            f"Grey bars are numbers of examples.{cut}"
        )
        return Section("Data", facts=facts, plots=[Plot(drawing, caption, wide)])
    by_class = bool(fed.get("label_counts"))
    legend = [Key(name, f"k{shade}") for shade, name in enumerate(classes)] if by_class else []
    caption = f"A bar is a client; its height is the number of its examples{', by class' if by_class else ''}.{cut}"
    drawing = stacked_bars("Examples of each client", names, drawn)
    return Section("Data", facts=facts, legend=legend, plots=[Plot(drawing, caption, wide)])


def _facts(run: RunFiles) -> list[tuple[str, str]]:
    fed = run.part("federation")
    sizes = fed.get("sizes") or []
    between = f"{min(sizes):,} to {max(sizes):,} examples, median {statistics.median(sizes):,.0f}" if sizes else ""
    rows = [
        ("Data", ". ".join(str(fed[key]) for key in ("data", "note") if fed.get(key))),
        ("Split", str(fed.get("how") or "")),
        ("Clients", "; ".join(filter(None, [f"{fed['clients']:,}" if fed.get("clients") else "", between]))),
        ("Examples", f"{fed['examples']:,} for training" if fed.get("examples") else ""),
        ("Out of distribution", run.outside),
    ]
    return [(label, value) for label, value in rows if value]


def _labels(names: Sequence[Any] | None, count: int) -> list[str]:
    return [str(name) for name in (names if names and len(names) == count else range(count))]


def communication_section(run: RunFiles) -> Section:
    """Bytes in both directions, rejected updates, and guards that acted."""
    rounds = [line["round"] for line in run.rounds]
    sums = [list(accumulate(line.get(key) or 0 for line in run.rounds)) for key in ("bytes_down", "bytes_up")]
    plots = []
    if rounds and (sums[0][-1] or sums[1][-1]):
        lines = [Line(rounds, total, colour, dashed=colour == 1) for colour, total in enumerate(sums)]
        caption = f"In total {text.data_size(sums[0][-1])} to clients and {text.data_size(sums[1][-1])} from clients."
        plots.append(Plot(curves("Bytes sent", lines, unit="B"), caption))
    tables = [table for table in (_rejected_table(run.rounds), _guard_table(run.rounds)) if table.rows]
    legend = [Key("to clients", "s0"), Key("from clients", "s1", "dashed")] if plots else []
    return Section("Communication", legend=legend, plots=plots, tables=tables)


def _rejected_table(rounds: Sequence[dict[str, Any]]) -> Table:
    """A row for each client and kind of reason, with the reason of the last time: figures in it differ by round."""
    found: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for line in rounds:
        for entry in line.get("rejected") or []:
            client, reason = str(entry.get("client", text.NONE)), str(entry.get("reason", ""))
            found.setdefault((client, FIGURE.sub("", reason)), []).append((line["round"], reason))
    rows = []
    for (client, _), times in found.items():
        last, reason = times[-1]
        count = Cell(text.plural(len(times), "time"), sort=len(times))
        rows.append([Cell(client), Cell(reason), count, Cell(str(last), sort=last)])
    return Table(["client", "last reason", "how often", "last in round"], rows, "Rejected updates.", prose=True)


def _guard_table(rounds: Sequence[dict[str, Any]]) -> Table:
    total: Counter[str] = Counter()
    for line in rounds:
        total.update(line.get("guards") or {})
    rows = [[Cell(name), Cell(f"{count:,}", sort=count)] for name, count in total.items()]
    return Table(["guard", "how often"], rows, "Numerical guards that changed a value.")
