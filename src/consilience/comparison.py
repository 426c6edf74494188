"""compare: several methods on the same federation, with the same budget, over several seeds."""

from __future__ import annotations

import json
import math
import time
import types
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from consilience.algorithms.switch import Method, Switch
from consilience.checkpoint import describe
from consilience.data.dataset import Dataset
from consilience.data.federation import Federation
from consilience.errors import CheckpointError, ConfigError
from consilience.experiment import Run, fit
from consilience.files import write_atomically
from consilience.metrics import MARGINAL, spread
from consilience.report.panels import Panels
from consilience.task import Task

FRAME, PADDING = 4, 3  # characters around the first column of a table, and around each other


@dataclass(frozen=True)
class Setting:
    """What methods are compared on."""

    task: Task
    federation: Federation
    test: Dataset | Federation


@dataclass(frozen=True)
class Row:
    """One number of a table: mean and sample standard deviation over `n` seeds, and what a paper reports."""

    method: str
    metric: str
    mean: float
    std: float | None
    n: int
    paper: float | None = None


@dataclass
class Comparison:
    """Rows over methods and metrics, per-client scores, figures, and the runs behind them. `over` is what a row's n
    counts."""

    title: str
    text: str = ""
    command: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    per_client: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    figures: list[Panels] = field(default_factory=list)
    over: str = "seeds"

    def save(self, out: Path) -> None:
        """comparison.json, which the report reads."""
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "comparison.json", json.dumps(asdict(self), indent=1, ensure_ascii=False))

    def tables(self, width: int = 10_000) -> list[Table]:
        """Methods × metrics for the terminal, with the papers' figures where there are any. What a method predicts by
        its whole posterior has a line of its own. What is wider than `width` goes on in a further table."""
        metrics = list(dict.fromkeys(row.metric.removesuffix(MARGINAL) for row in self.rows))
        cells = {(row.method, row.metric): row for row in self.rows}
        most = max((row.n for row in self.rows), default=1)
        lines: list[tuple[str, list[str]]] = []
        for method in dict.fromkeys(row.method for row in self.rows):
            for name, kind in ((method, ""), ("  marginal", MARGINAL)):
                found = [cells.get((method, metric + kind)) for metric in metrics]
                if any(found):
                    lines.append((name, [_cell(row, most) for row in found]))
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
        """The tables on stdout."""
        console = Console(markup=False)
        for table in self.tables(console.width):
            console.print(table)


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
    some = "" if row.n == most else f" ({row.n} of {most})"  # the others never got there
    return f"{row.mean:.{places}f}{deviation}{some}" + ("" if row.paper is None else f" (paper {row.paper:g})")


def compare(
    algorithms: Mapping[str, Method] | Iterable[Method],
    setting: Setting | Callable[[int], Setting],
    *,
    seeds: int = 3,
    out: str | Path | None = None,
    title: str = "Comparison",
    text: str = "",
    command: str = "",
    resume: bool = False,
    on_run: Callable[[str, int], None] | None = None,
    measure: Callable[[Run, Setting], dict[str, float]] | None = None,
    paper: Mapping[tuple[str, str], float] = types.MappingProxyType({}),
    **options: Any,
) -> Comparison:
    """Run every method for every seed with the same `options` of `fit`. A `setting` that is a function of the seed
    gives each seed its own split or initial weights; the same for all methods, so their scores are paired. `measure`
    adds scores of its own to each run's; `paper` holds published figures by (method, metric). Methods that switch from
    the same first method at the same round share that warm start: with `out` it is run once a seed."""
    methods = _labelled(algorithms)
    if out is not None and not resume and (Path(out) / "comparison.json").exists():
        raise CheckpointError(f"{out} holds a comparison already: resume it, or choose another directory")
    result = Comparison(title, text, command)
    scores: dict[tuple[str, str], list[float]] = {}
    by_client: dict[tuple[str, str, str], list[float]] = {}
    start = time.perf_counter()
    for seed in range(seeds):
        at = setting(seed) if callable(setting) else setting
        for method, algorithm in methods.items():
            where = None if out is None else Path(out) / method / f"seed-{seed}"
            if on_run is not None:
                on_run(method, seed)
            again = resume and where is not None
            same: dict[str, Any] = {"test": at.test, "seed": seed, **options}
            warm = None if out is None else _warm_start(algorithm, at, Path(out), **same)
            run = fit(algorithm, at.task, at.federation, out=where, resume=again, warm=warm, **same)
            _collect(run, at.test, method, scores, by_client)
            for metric, value in (measure(run, at) if measure is not None else {}).items():
                scores.setdefault((method, metric), []).append(value)
            if where is not None and out is not None:
                relative = str(where.relative_to(Path(out)))
                result.runs.append({"method": method, "seed": seed, "directory": relative})
    result.rows = [
        Row(method, metric, *_spread(values), len(values), paper.get((method, metric)))
        for (method, metric), values in scores.items()
    ]
    for (method, client, metric), values in by_client.items():
        mean, std = _spread(values)
        entry = {"method": method, "client": client, "metric": metric, "mean": mean, "std": std}
        result.per_client.append(entry)
    result.seconds = time.perf_counter() - start
    if out is not None:
        result.save(Path(out))
    return result


def _warm_start(method: Method, at: Setting, out: Path, *, rounds: int, seed: int, **same: Any) -> Path | None:
    """The directory of a run of a switch's first method, run now if it is not there yet; None for other methods."""
    if not isinstance(method, Switch) or rounds <= method.at:
        return None
    first = zlib.crc32(json.dumps(describe(method.first)).encode())
    where = out / "warm starts" / f"{method.first.name}-{method.at}-{first:08x}" / f"seed-{seed}"
    resume = (where / "run.json").exists()
    fit(method.first, at.task, at.federation, rounds=method.at, seed=seed, out=where, resume=resume, **same)
    return where


def _labelled(algorithms: Mapping[str, Method] | Iterable[Method]) -> dict[str, Method]:
    """Methods by label; a label is the name of a folder too."""
    if isinstance(algorithms, Mapping):
        labelled = list(algorithms.items())
    else:
        labelled = [(algorithm.name, algorithm) for algorithm in algorithms]
    methods: dict[str, Method] = {}
    for label, algorithm in labelled:
        if label in methods:
            raise ConfigError(f"two methods are called {label!r}: pass a mapping from labels to methods")
        if label in ("", ".", "..") or "/" in label or "\0" in label:
            raise ConfigError(f"{label!r} cannot be a method's label: it names a folder, so it must have no '/'")
        methods[label] = algorithm
    return methods


def _spread(values: list[float]) -> tuple[float, float | None]:
    """Mean and deviation; a score that is undefined or infinite for some seed has no deviation."""
    return spread(values) if all(map(math.isfinite, values)) else (sum(values) / len(values), None)


def _collect(
    run: Run,
    test: Dataset | Federation,
    method: str,
    scores: dict[tuple[str, str], list[float]],
    by_client: dict[tuple[str, str, str], list[float]],
) -> None:
    evaluation = run.evaluate(test)
    for metric, value in evaluation.point.items():
        scores.setdefault((method, metric), []).append(value)
    for metric, value in (evaluation.marginal or {}).items():
        scores.setdefault((method, f"{metric}{MARGINAL}"), []).append(value)
    for metric, value in run.algorithm.facts(run.server).items():
        scores.setdefault((method, metric), []).append(value)
    for client in evaluation.clients:
        for metric, value in client["metrics"].items():
            by_client.setdefault((method, client["name"], metric), []).append(value)
