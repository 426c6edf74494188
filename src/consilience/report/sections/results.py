"""Results of a comparison: the table, differences between methods, and tuning."""

from collections.abc import Mapping, Sequence
from typing import Any

from consilience.core import text
from consilience.core.display import clip
from consilience.metrics import MARGINAL, NO_OWN, Directions, direction
from consilience.report.drawing.canvas import swatch
from consilience.report.drawing.rows import forest
from consilience.report.page import Cell, Plot, Section, Table
from consilience.report.sections.words import Folded, better, metric_name

ARROW = {1: " ↑", -1: " ↓", 0: ""}


def result_section(
    rows: Sequence[dict[str, Any]], methods: Sequence[str], over: str, ways: Directions = NO_OWN
) -> Section:
    """Methods × metrics, with the best of each metric in bold and the paper's figures. The posterior average of a
    method has a line of its own."""
    rows = [_own_line(row) for row in rows]
    most = max((row.get("n") or 1 for row in rows), default=1)
    lines = [(method, line) for method in methods for line in (method, f"{method}, marginal")]
    listed = [(method, line) for method, line in lines if any(row["method"] == line for row in rows)]
    head, columns = ["method"], []
    for metric in text.in_order(str(row["metric"]) for row in rows):
        own = {str(row["method"]): row for row in rows if row["metric"] == metric}
        columns.append(_result_cells(own, most, direction(metric, ways)))
        paper = any(row.get("paper") is not None for row in own.values())
        head += [text.short(metric) + ARROW[direction(metric, ways)], *(["paper"] if paper else [])]
        columns += [_paper_cells(own)] if paper else []
    table = []
    for method, line in listed:
        cells = [column.get(line, Cell(text.NONE, sort="")) for column in columns]
        table.append([Cell(line, swatch=swatch(methods.index(method))), *cells])
    about = f"Mean ± sample standard deviation over {most} {over}." if most > 1 else f"One {over.removesuffix('s')}."
    grey = " Grey: the paper's figures." if "paper" in head else ""
    caption = f"{about} Bold: the best mean, in the direction of the arrow.{grey} Click a heading to sort."
    return Section("Results", tables=[Table(head, table, caption)] if table else [])


def _own_line(row: dict[str, Any]) -> dict[str, Any]:
    metric = str(row["metric"])
    if not metric.endswith(MARGINAL):
        return row
    return {**row, "method": f"{row['method']}, marginal", "metric": metric.removesuffix(MARGINAL)}


def _result_cells(rows: Mapping[str, dict[str, Any]], most: int, way: int) -> dict[str, Cell]:
    """Mean ± standard deviation of one metric, by line; with the number of runs if some did not get there."""
    means = [row.get("mean") for row in rows.values()]
    places = text.decimals(means)
    numbers: list[Any] = [mean for mean in means if text.is_number(mean)]
    best = text.fixed(max(numbers, key=lambda mean: way * mean), places) if way and len(numbers) > 1 else None
    cells = {}
    for line, row in rows.items():
        around = f"± {text.fixed(row['std'], places)}" if text.is_number(row.get("std")) else ""
        if 0 < (row.get("n") or 0) < most:
            around = f"{around} ({row['n']} of {most})".strip()
        is_best = text.fixed(row.get("mean"), places) == best
        cells[line] = Cell.of(row.get("mean"), places, spread=around, best=is_best)
    return cells


def _paper_cells(rows: Mapping[str, dict[str, Any]]) -> dict[str, Cell]:
    places = text.decimals(row.get("mean") for row in rows.values())
    found = {line: row.get("paper") for line, row in rows.items()}
    return {
        line: Cell.of(value, places, quiet=True) if text.is_number(value) else Cell("", sort="", quiet=True)
        for line, value in found.items()
    }


def difference_section(entries: Sequence[dict[str, Any]], methods: Sequence[str], ways: Directions = NO_OWN) -> Section:
    """Paired differences between methods on the same seeds, with 95 % intervals."""
    entries = [entry for entry in entries if text.is_number(entry.get("difference"))]
    groups: list[tuple[str, list[dict[str, Any]]]] = []
    for metric in text.in_order(str(entry.get("metric", "")) for entry in entries):
        groups.append((metric, [entry for entry in entries if str(entry.get("metric", "")) == metric]))
    plots = [Plot(_forest(metric, rows, methods), better(metric, ways)) for metric, rows in groups]
    rows = [_difference_row(metric, entry, group) for metric, group in groups for entry in group]
    clear = sum(_is_clear(entry) for entry in entries)
    verdict = f"{clear} of {text.plural(len(entries), 'difference')} {'is' if clear == 1 else 'are'} significant: the "
    verdict += "95 % interval excludes 0."
    if all(_interval(entry)[0] is None for entry in entries):
        verdict = "There are too few seeds for 95 % intervals."
    about = f"{verdict} A difference is the first method's mean minus the second's, over the same seeds."
    head = ["method", "versus", "metric", "difference", "95 % interval", "p", "seeds"]
    tables = [Table(head, rows, "Bold: the 95 % interval excludes 0.")] if rows else []
    return Section("Differences", about, plots=plots, tables=tables)


OVER_EXAMPLES = (
    "with the interval over the client's test examples for these models, from the same bootstrap samples for both. "
    "Bold: the interval excludes 0. Over several seeds, differences are means."
)
OVER_SPLITS = (
    "a mean over random splits with its 95 % interval, for splits that share examples, and in how many splits the "
    "method was better. Bold: the interval excludes 0."
)


def local_section(entries: Sequence[dict[str, Any]], methods: Sequence[str], ways: Directions = NO_OWN) -> Section:
    """Differences to LocalOnly at each client: a table for each metric, the first one open."""
    versus = str(entries[0]["versus"]) if entries else ""
    listed = [method for method in methods if any(entry["method"] == method for entry in entries)]
    tables: list[Table] = []
    folded: Folded = []
    for metric in text.in_order(str(entry["metric"]) for entry in entries):
        own = {(entry["client"], entry["method"]): entry for entry in entries if entry["metric"] == metric}
        rows = [
            [Cell(str(client)), *(_local_cell(own.get((client, method))) for method in listed)]
            for client in dict.fromkeys(client for client, _ in own)
        ]
        table = Table(["client", *listed], rows, f"{text.long(metric)}. {better(metric, ways)}")
        if tables:
            folded.append((text.long(metric), table))
        else:
            tables.append(table)
    about = (
        f"A method's score minus that of {versus}, {OVER_SPLITS if 'n' in entries[0] else OVER_EXAMPLES}"
        if entries
        else ""
    )
    return Section(f"Differences to {versus} at each client", about, tables=tables, folded=folded)


def _local_cell(entry: Mapping[str, Any] | None) -> Cell:
    if entry is None:
        return Cell(text.NONE, sort="")
    low, high = _interval(entry)
    around = "" if low is None or high is None else f"[{_signed(low, 3)}, {_signed(high, 3)}]"
    if entry.get("n"):
        around = f"{around} better in {entry['better']} of {entry['n']}".strip()
    return Cell(_signed(entry["difference"], 3), around, sort=entry["difference"], best=_is_clear(entry))


def _interval(entry: Mapping[str, Any]) -> tuple[float | None, float | None]:
    low, high = (entry[end] if text.is_number(entry.get(end)) else None for end in ("low", "high"))
    return (low, high) if low is not None and high is not None else (None, None)


def _is_clear(entry: Mapping[str, Any]) -> bool:
    low, high = _interval(entry)
    return low is not None and high is not None and not low <= 0 <= high


def _difference_row(metric: str, entry: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> list[Cell]:
    (low, high), p = _interval(entry), entry.get("p") if text.is_number(entry.get("p")) else None
    places = text.decimals(other.get(name) for other in group for name in ("low", "difference", "high"))
    interval = text.NONE if low is None or high is None else f"{_signed(low, places)} to {_signed(high, places)}"
    chance = text.NONE if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
    return [
        Cell(str(entry.get("method", ""))),
        Cell(str(entry.get("versus", ""))),
        Cell(metric_name(metric)),
        Cell(_signed(entry["difference"], places), sort=entry["difference"], best=_is_clear(entry)),
        Cell(interval, sort="" if low is None else low),
        Cell(chance, sort="" if p is None else p),
        Cell(str(entry.get("n") or ""), sort=entry.get("n") or ""),
    ]


def _signed(value: float, places: int) -> str:
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{text.fixed(abs(value), places)}"


def _forest(metric: str, entries: Sequence[dict[str, Any]], methods: Sequence[str]) -> Any:
    rows = []
    for entry in entries:
        method, versus = str(entry.get("method", "")), str(entry.get("versus", ""))
        colour = methods.index(method) if method in methods else 0
        rows.append((f"{clip(method, 16)} − {clip(versus, 16)}", entry["difference"], *_interval(entry), colour))
    return forest(metric_name(metric, text.long(metric.removesuffix(MARGINAL))), rows)


def tuning_section(entries: Sequence[dict[str, Any]]) -> Section:
    """The settings that were chosen, and all that were tried."""
    rows = []
    for entry in entries:
        chosen, trials = entry.get("chosen") or {}, entry.get("trials") or len(entry.get("all") or [])
        settings = ", ".join(f"{path} = {text.call(value)}" for path, value in chosen.items())
        cells = [Cell(str(entry.get("method", ""))), Cell(settings or "as configured"), Cell.of(entry.get("score"), 4)]
        rows.append([*cells, Cell(text.short(str(entry.get("metric", "")))), Cell(str(trials), sort=trials)])
    head = ["method", "chosen", "score", "metric", "trials"]
    folded: Folded = [("Chosen settings", Table(head, rows))] if rows else []
    for entry in entries:
        table = _trial_table(entry)
        if table.rows:
            folded.append((f"{entry.get('method', '')}: {text.plural(len(table.rows), 'trial')}", table))
    return Section("Tuning", "Settings were chosen before the seeds above were run.", folded=folded)


def _trial_table(entry: Mapping[str, Any]) -> Table:
    tried: list[dict[str, Any]] = entry.get("all") or []
    paths = list(dict.fromkeys(path for trial in tried for path in trial.get("settings") or {}))
    rows = []
    for number, trial in enumerate(tried, 1):
        found = trial.get("settings") or {}
        cells = [Cell(str(number), sort=number)]
        for value in (found.get(path) for path in paths):
            shown = text.NONE if value is None else text.call(value)
            cells.append(Cell(shown, sort=value if text.is_number(value) else None))
        rows.append([*cells, Cell.of(trial.get("score"), 4, best=found == (entry.get("chosen") or {}))])
    return Table(["trial", *paths, metric_name(str(entry.get("metric", "score")))], rows)
