"""compare: several methods on the same federation, with the same budget, over several seeds."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
import types
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from consilience.algorithms.switch import Method, Switch
from consilience.core import display
from consilience.core.display import clip
from consilience.core.errors import CheckpointError, ConfigError
from consilience.core.files import explained, write_atomically
from consilience.core.text import plural
from consilience.data.dataset import Dataset
from consilience.data.federation import Federation
from consilience.figures.panels import Panels
from consilience.figures.pictures import Pictures
from consilience.metrics import MARGINAL, direction, rounds_to, spread
from consilience.runs.directory import Storage
from consilience.runs.fit import fit
from consilience.runs.identity import describe
from consilience.runs.progress import Runs
from consilience.runs.rows import flat, frame
from consilience.runs.run import Run
from consilience.runs.stored import RunFiles, load_run, read_runs
from consilience.studies import tune as tuning
from consilience.tasks.task import Task

if TYPE_CHECKING:
    import pandas


FRAME, PADDING = 4, 3  # characters around the first column of a table, and around each other
SAME = 1e-12  # of the largest difference: how much differences vary by rounding alone


@dataclass(frozen=True)
class Setting:
    """What methods are compared on."""

    task: Task
    federation: Federation
    test: Dataset | Federation

    def __post_init__(self) -> None:
        if self.test is None:
            raise ConfigError("methods are compared by their scores on test data: give the setting some as test=")


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
    counts. `scores` are those of every seed, `paired` how far methods are from the first one, `tuning` how their
    settings were found, `out` where it was saved."""

    title: str
    text: str = ""
    command: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    per_client: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    figures: Sequence[Panels | Pictures] = field(default_factory=list)
    over: str = "seeds"
    scores: list[dict[str, Any]] = field(default_factory=list)
    paired: list[dict[str, Any]] = field(default_factory=list)
    tuning: list[dict[str, Any]] = field(default_factory=list)
    out: Path | None = field(default=None, init=False)

    def save(self, out: Path) -> None:
        """comparison.json, which the report reads."""
        self.out = out
        content = {key: value for key, value in asdict(self).items() if key != "out"}
        with explained(out):
            out.mkdir(parents=True, exist_ok=True)
            write_atomically(out / "comparison.json", json.dumps(content, indent=1, ensure_ascii=False))

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
        """Methods × metrics for the terminal, with the papers' figures where there are any. A posterior average has a
        line of its own. Columns beyond `width` go into a further table."""
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
        """The tables on stdout."""
        console = Console(markup=False)
        for table in self.tables(console.width):
            console.print(table)

    def __repr__(self) -> str:
        methods = list(dict.fromkeys(row.method for row in self.rows))
        return f"Comparison({clip(self.title, 60)}: {clip(', '.join(methods))}; {plural(len(self.runs), 'stored run')})"

    def _repr_html_(self) -> str:
        metrics, lines = self._lines()
        return display.table(["method", *metrics], [[name, *cells] for name, cells in lines], self.title)

    def frame(self, runs: bool = False) -> pandas.DataFrame:
        """The table as a data frame; with `runs` every round of every run that was kept. Needs pandas."""
        if not runs:
            names = [column.name for column in fields(Row)]
            return frame([asdict(row) for row in self.rows], names).astype({"std": float, "paper": float})
        seeds = [{"method": run["method"], "seed": run["seed"]} for run in self.runs]
        out = self._place()
        stored = [load_run(out / run["directory"]) for run in self.runs]
        return frame([{**who, **flat(line)} for who, run in zip(seeds, stored, strict=True) for line in run.history])

    def stored(self) -> Mapping[str, Sequence[RunFiles]]:
        """What the runs behind it have left on disk, by method."""
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
    some = "" if row.n == most else f" ({row.n} of {most})"  # the others never got there
    return f"{row.mean:.{places}f}{deviation}{some}" + ("" if row.paper is None else f" (paper {row.paper:g})")


def compare(
    algorithms: Mapping[str, Method] | Iterable[Method],
    setting: Setting | Callable[[int], Setting],
    *,
    seeds: int | Sequence[int] = 3,
    tune: int | None = None,
    select: str | None = None,
    target: float | None = None,
    out: str | Path | Storage | None = None,
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
    gives each seed its own split or initial weights; the same for all methods, so their scores are paired. `seeds` is
    how many there are, from 0, or which: `range(7, 10)`. `measure` adds scores of its own to each run's; `paper` holds
    published figures by (method, metric). Methods that switch from the same first method at the same round share that
    warm start: with `out` it is run once a seed.

    With `tune`, every method first has as many trials with other settings, on the first seed's training data (see
    `tuning.tune`, also for `select`), and its best settings are used for all seeds. With `target`, the table has the
    first round whose accuracy is at least that; a run that never got there has none.
    """
    methods, numbers = _labelled(algorithms), _numbers(seeds)
    tuning.must_simulate(options)
    if select is not None and tune is None:
        raise ConfigError("select is the score to tune by: pass tune= as well, or leave it out")
    storage = Storage.of(out)
    if storage.directory is not None:
        _must_be_free(storage.directory, resume)
    at = lru_cache(maxsize=1)(setting if callable(setting) else lambda _: setting)  # tuning's is the first seed's
    result, found = Comparison(title, text, command), _Scores(paper)
    start = time.perf_counter()
    trials = {} if tune is None else {label: len(tuning.candidates(label, m, tune)) for label, m in methods.items()}
    with Runs(sum(trials.values()) + len(methods) * len(numbers), bool(options.get("progress", True))) as runs:
        if tune is not None:

            def on_trial(label: str, trial: int) -> None:
                runs.begin(f"tuning {label}, trial {trial + 1} of {trials[label]}")

            same: dict[str, Any] = {"out": storage, "resume": resume, "select": select, "on_trial": on_trial}
            same |= {"seed": numbers[0], **options}
            tuned = tuning.tune(methods, at(numbers[0]), trials=tune, **same)
            methods, result.tuning = tuned.methods, tuned.tuning
        for seed, (method, algorithm) in itertools.product(numbers, methods.items()):
            runs.begin(f"{method}, seed {seed}")
            if on_run is not None:
                on_run(method, seed)
            run, where = _run(algorithm, at(seed), method, storage, resume, seed, **options)
            found.add(run, method, seed, {} if measure is None else measure(run, at(seed)), target)
            if where is not None:
                result.runs.append({"method": method, "seed": seed, "directory": str(where)})
    result.rows, result.per_client = found.rows(), found.per_client()
    result.scores, result.paired = found.listed(numbers), found.paired(list(methods))
    result.seconds = time.perf_counter() - start
    if storage.directory is not None:
        result.save(storage.directory)
    return result


def _run(
    algorithm: Method, at: Setting, method: str, storage: Storage, resume: bool, seed: int, **options: Any
) -> tuple[Run, Path | None]:
    """A run, and its directory inside the comparison's."""
    same: dict[str, Any] = {"test": at.test, "seed": seed, **options}
    if storage.directory is None:
        return fit(algorithm, at.task, at.federation, out=storage, **same), None
    where, warm = Path(method) / f"seed-{seed}", _warm_start(algorithm, at, storage, **same)
    out = storage.below(str(where), warm=warm)
    return fit(algorithm, at.task, at.federation, out=out, resume=resume, **same), where


def _warm_start(method: Method, at: Setting, out: Storage, *, rounds: int, seed: int, **same: Any) -> Path | None:
    """The directory of a run of a switch's first method, run now if it is not there yet; None for other methods."""
    if not isinstance(method, Switch) or rounds <= method.at:
        return None
    first = zlib.crc32(json.dumps(describe(method.first)).encode())
    own = out.below("warm starts", f"{method.first.name}-{method.at}-{first:08x}", f"seed-{seed}")
    where = own.directory
    assert where is not None
    resume = (where / "run.json").exists()
    fit(method.first, at.task, at.federation, rounds=method.at, seed=seed, out=own, resume=resume, **same)
    return where


def _must_be_free(out: Path, resume: bool) -> None:
    """Refuse a directory with something else in it."""
    if (out / "run.json").exists():
        raise CheckpointError(f"{out} holds a run: choose another directory for the comparison")
    if not resume and (out / "comparison.json").exists():
        raise CheckpointError(f"{out} holds a comparison already: resume it, or choose another directory")


def _numbers(seeds: int | Sequence[int]) -> list[int]:
    found = list(range(seeds) if isinstance(seeds, int) else seeds)
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"seeds must be a number of at least 1, or a list of different seeds, got {seeds!r}")
    return found


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
    if not methods:
        raise ConfigError("there is nothing to compare: pass at least one method")
    return methods


def _spread(values: list[float]) -> tuple[float, float | None]:
    """Mean and deviation; a score that is undefined or infinite for some seed has no deviation."""
    return spread(values) if all(map(math.isfinite, values)) else (sum(values) / len(values), None)


@dataclass
class _Scores:
    """Every seed's scores, by (method, metric) and by (method, client, metric)."""

    paper: Mapping[tuple[str, str], float]
    by_metric: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    by_client: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)

    def add(self, run: Run, method: str, seed: int, measured: Mapping[str, float], target: float | None) -> None:
        """What a run is worth, and what it cost; `measured` goes before what is known of every run."""
        evaluation = run.evaluation
        assert evaluation is not None  # a setting has test data
        averaged = {f"{metric}{MARGINAL}": value for metric, value in (evaluation.marginal or {}).items()}
        found = {**evaluation.point, **averaged, **run.algorithm.facts(run.server), **measured}
        for metric, value in costs(run, target).items():
            found.setdefault(metric, value)
        for metric, value in found.items():
            self.by_metric.setdefault((method, metric), {})[seed] = value
        for client in evaluation.clients:
            for metric, value in client["metrics"].items():
                self.by_client.setdefault((method, client["name"], metric), []).append(value)

    def rows(self) -> list[Row]:
        """Means over seeds."""
        return [
            Row(method, metric, *_spread([*values.values()]), len(values), self.paper.get((method, metric)))
            for (method, metric), values in self.by_metric.items()
        ]

    def per_client(self) -> list[dict[str, Any]]:
        """Means over seeds at every client."""
        entries = []
        for (method, client, metric), values in self.by_client.items():
            mean, std = _spread(values)
            entries.append({"method": method, "client": client, "metric": metric, "mean": mean, "std": std})
        return entries

    def listed(self, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """All scores in the order of seeds, None where a run has none."""
        return [
            {"method": method, "metric": metric, "values": [values.get(seed) for seed in seeds]}
            for (method, metric), values in self.by_metric.items()
        ]

    def paired(self, methods: Sequence[str]) -> list[dict[str, Any]]:
        """How far every method is from the first one, seed by seed, for every metric with a better and a worse."""
        entries = []
        for (method, metric), values in self.by_metric.items():
            first = self.by_metric.get((methods[0], metric), {})
            pairs = [(values[seed], first[seed]) for seed in sorted(values.keys() & first.keys())]
            pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
            if method != methods[0] and direction(metric) and pairs:
                entries.append({"method": method, "versus": methods[0], "metric": metric, **paired_test(pairs)})
        return entries


def costs(run: Run, target: float | None = None) -> dict[str, float]:
    """Seconds of training and megabytes sent, up and down, over all rounds; with a `target`, the first round whose
    accuracy (or else first score that rises) is at least that, if there is one."""
    sent = sum(line["bytes_up"] + line["bytes_down"] for line in run.history)
    found = {"seconds": sum(line["seconds"] for line in run.history), "MB sent": sent / 1e6}
    scores = [(line["round"], line["eval"]) for line in run.history if "eval" in line]
    if target is None or not scores:
        return found
    rising = [metric for metric in scores[-1][1] if direction(metric) > 0]
    if not rising:
        raise ConfigError(f"target is for a score that rises, and there is none: {', '.join(scores[-1][1])}")
    metric = "accuracy" if "accuracy" in rising else rising[0]
    reached = rounds_to([(number, values[metric]) for number, values in scores], target, window=1)
    return found if reached is None else {**found, f"rounds to {target:g}": float(reached)}


def paired_test(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The mean difference of pairs (a, b), its 95 % interval and p by Student's t; without these for fewer than three
    pairs, or differences that are all the same."""
    from scipy import stats  # not needed by most commands, and slow to import

    differences = [a - b for a, b in pairs]
    mean, n = statistics.fmean(differences), len(pairs)
    low = high = p = None
    if n >= 3 and max(differences) - min(differences) > SAME * max(map(abs, differences)):
        test = stats.ttest_rel([a for a, _ in pairs], [b for _, b in pairs])
        interval = test.confidence_interval(0.95)
        low, high, p = float(interval.low), float(interval.high), float(test.pvalue)
    return {"difference": mean, "low": low, "high": high, "p": p, "n": n}
