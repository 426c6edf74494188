"""Traffic, rejected updates and numerical guards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from consilience.core import text
from consilience.report.drawing.charts import Line, curves
from consilience.report.page import Cell, Key, Plot, Section, Table
from consilience.runs.stored import RunFiles


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
    found: dict[tuple[str, str], list[int]] = {}
    for line in rounds:
        for entry in line.get("rejected") or []:
            key = (str(entry.get("client", text.NONE)), str(entry.get("reason", "")))
            found.setdefault(key, []).append(line["round"])
    rows = [
        [Cell(client), Cell(reason), Cell(text.plural(len(at), "time"), sort=len(at)), Cell(str(at[-1]), sort=at[-1])]
        for (client, reason), at in found.items()
    ]
    return Table(["client", "reason", "how often", "last in round"], rows, "Rejected updates.", prose=True)


def _guard_table(rounds: Sequence[dict[str, Any]]) -> Table:
    total: Counter[str] = Counter()
    for line in rounds:
        total.update(line.get("guards") or {})
    rows = [[Cell(name), Cell(f"{count:,}", sort=count)] for name, count in total.items()]
    return Table(["guard", "how often"], rows, "Numerical guards that changed a value.")
