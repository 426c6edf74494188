"""Comparison: a table of methods × metrics, and the runs behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from consilience.core import ConfigError, display
from consilience.core.display import clip
from consilience.core.files import explained, remove_unfinished, write_atomically
from consilience.core.seals import seal_json
from consilience.core.text import plural
from consilience.figures import Panels, Pictures
from consilience.metrics import MARGINAL
from consilience.runs.rows import flat, frame
from consilience.runs.stored import RunFiles, load_run, read_runs

if TYPE_CHECKING:
    import pandas


FRAME, PADDING = 4, 3  # characters around the first column of a table, and around each other


@dataclass(frozen=True)
class Row:
    """One number of a table: mean and sample standard deviation over `n` seeds, and a paper's figure."""

    method: str
    metric: str
    mean: float
    std: float | None
    n: int
    paper: float | None = None


@dataclass
class Comparison:
    """Rows over methods and metrics, per-client scores, figures, and the runs behind them. `finding` says in words what
    was found. `over` names the unit of a row's n. `scores` has every seed's, `paired` the differences of methods to the
    first one, `at_clients` those to LocalOnly at each client, `tuning` the trials of their settings, `directions` those
    of own metrics (+1 if more is better), `coefficients` a table of them as in evaluation.json, `out` the directory."""

    title: str
    text: str = ""
    command: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    per_client: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    figures: Sequence[Panels | Pictures] = field(default_factory=list)
    finding: str = ""
    over: str = "seeds"
    scores: list[dict[str, Any]] = field(default_factory=list)
    paired: list[dict[str, Any]] = field(default_factory=list)
    at_clients: list[dict[str, Any]] = field(default_factory=list)
    tuning: list[dict[str, Any]] = field(default_factory=list)
    directions: dict[str, int] = field(default_factory=dict)
    coefficients: dict[str, Any] | None = None
    out: Path | None = field(default=None, init=False)

    def content(self) -> dict[str, Any]:
        """All but the directory, as plain data."""
        return {key: value for key, value in asdict(self).items() if key != "out"}

    @classmethod
    def of(cls, content: Mapping[str, Any], out: Path | None) -> Comparison:
        """The comparison with this content."""
        found = cls(**{**content, "rows": [Row(**row) for row in content["rows"]]})
        found.out = out
        return found

    def save(self, out: Path) -> None:
        """Write comparison.json, which the report reads."""
        self.out, content = out, self.content()
        with explained(out):
            out.mkdir(parents=True, exist_ok=True)
            remove_unfinished(out)
            write_atomically(out / "comparison.json", seal_json(content, indent=1))

    def _lines(self) -> tuple[list[str], list[tuple[str, list[str]]]]:
        """The metrics, and one line of cells for each method and each posterior average."""
        metrics = list(dict.fromkeys(row.metric.removesuffix(MARGINAL) for row in self.rows))
        cells = {(row.method, row.metric): row for row in self.rows}
        most = max((row.n for row in self.rows), default=1)
        lines: list[tuple[str, list[str]]] = []
        for method in dict.fromkeys(row.method for row in self.rows):
            for name, kind in ((method, ""), ("  marginal", MARGINAL)):
                found = [cells.get((method, metric + kind)) for metric in metrics]
                if any(found):
                    lines.append((name, [_cell(row, most) for row in found]))
        return metrics, lines

    def tables(self, width: int = 10_000) -> list[Table]:
        """Methods × metrics for the terminal, with papers' figures. A posterior average has its own line. Columns
        beyond `width` go into a further table."""
        metrics, lines = self._lines()
        first = max((len(name) for name, _ in lines), default=0)
        widths = [max(len(metric), *(len(line[i]) for _, line in lines)) for i, metric in enumerate(metrics)]
        tables: list[Table] = []
        for columns in _groups(widths, width - first - FRAME):
            table = Table(title=None if tables else self.title)
            table.add_column("method", no_wrap=True)
            for column in columns:
                table.add_column(metrics[column], justify="right", no_wrap=True)
            for name, line in lines:
                if any(line[column] for column in columns):
                    table.add_row(name, *(line[column] for column in columns))
            tables.append(table)
        return tables

    def print(self) -> None:
        console = Console(markup=False)
        if self.finding:
            console.print(self.finding, highlight=False)
        for table in self.tables(console.width):
            console.print(table)

    def __repr__(self) -> str:
        methods = list(dict.fromkeys(row.method for row in self.rows))
        return f"Comparison({clip(self.title, 60)}: {clip(', '.join(methods))}; {plural(len(self.runs), 'stored run')})"

    def _repr_html_(self) -> str:
        metrics, lines = self._lines()
        return display.table(["method", *metrics], [[name, *cells] for name, cells in lines], self.title)

    def frame(self, runs: bool = False) -> pandas.DataFrame:
        """The table as a data frame; with `runs`, every round of every stored run. Needs pandas."""
        if not runs:
            names = [column.name for column in fields(Row)]
            return frame([asdict(row) for row in self.rows], names).astype({"std": float, "paper": float})
        seeds = [{"method": run["method"], "seed": run["seed"]} for run in self.runs]
        out = self._place()
        stored = [load_run(out / run["directory"]) for run in self.runs]
        return frame([{**who, **flat(line)} for who, run in zip(seeds, stored, strict=True) for line in run.history])

    def stored(self) -> Mapping[str, Sequence[RunFiles]]:
        """The stored runs, by method."""
        methods = list(dict.fromkeys(row.method for row in self.rows))
        return read_runs(self._place(), methods, self.runs)

    def _place(self) -> Path:
        if self.out is None or not self.runs:
            raise ConfigError("single runs are needed, and none were kept: pass out= to compare")
        return self.out


def _groups(widths: list[int], room: int) -> list[list[int]]:
    """Columns in groups that fit, in their order, at least one in each."""
    groups: list[list[int]] = []
    left = 0
    for column, width in enumerate(widths):
        if not groups or left < width + PADDING:
            groups.append([])
            left = room
        groups[-1].append(column)
        left -= width + PADDING
    return groups


def _cell(row: Row | None, most: int) -> str:
    if row is None:
        return ""
    places = 0 if abs(row.mean) >= 100 else 3
    deviation = "" if row.std is None else f" ± {row.std:.{places}f}"
    some = "" if row.n == most else f" ({row.n} of {most})"  # the others have no score
    return f"{row.mean:.{places}f}{deviation}{some}" + ("" if row.paper is None else f" (paper {row.paper:g})")
