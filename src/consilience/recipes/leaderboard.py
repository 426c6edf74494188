"""The leaderboard: every method on four federations, with the same number of trials for each."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from consilience.core.errors import ConfigError, TaskError
from consilience.core.text import plural
from consilience.figures.panels import Mark, Panel, Panels
from consilience.metrics import MARGINAL, spread
from consilience.recipes.base import Options, Recipe, finished
from consilience.recipes.leaderboard_methods import FEW, ONCE, methods
from consilience.recipes.leaderboard_setting import ARENAS, Arena
from consilience.runs import Run, Storage
from consilience.studies import Comparison, Setting, compare
from consilience.studies.comparison import Row

TRIALS, QUICK_TRIALS = 8, 2
RESULTS = "results.jsonl"
SILENT = ("Pooled", "LocalOnly")  # methods that need no messages
WORST = "worst clients"
METRICS = ("accuracy", "nll", "ece", WORST, "MB sent", "seconds")
HEADS = ("accuracy", "NLL", "NLL − FedAvg's", "ECE", "worst clients", "MB", "seconds")
TEXT = (
    "Every client holds out a part of its examples for testing, and is tested with the model that it would use. Every "
    "method has {trials} of its own settings (its defaults, and draws from its ranges), scored by the NLL on a fifth "
    "of the first seed's training examples; the best are used for all seeds. “average” is the average of ten draws "
    "from a method's posterior; the other rows are the mean weights. “worst clients” is the mean accuracy of the tenth "
    "of the clients with the lowest one, at least one. “MB” is what all clients and the server sent in a run, and "
    "“seconds” the training of a run, beside others on the same machine. PFNM, Ensemble, FedFisher and β-PredBayes "
    "have one exchange. FedCGS replaces the head of FedAvg's network in the last round."
)
Line = dict[str, Any]


def rows(quick: bool) -> list[tuple[Arena, str]]:
    """Every federation with every method."""
    arenas = [arena.quick() for arena in ARENAS] if quick else ARENAS
    return [(arena, name) for arena in arenas for name in methods(arena) if not quick or name in FEW]


def worst(run: Run, at: Setting) -> dict[str, float]:
    """The mean accuracy of the worst tenth of the clients, at least one."""
    assert run.evaluation is not None
    accuracies = sorted(client["metrics"]["accuracy"] for client in run.evaluation.clients)
    few = accuracies[: max(1, len(accuracies) // 10)]
    return {WORST: sum(few) / len(few)}


def compute(arena: Arena, name: str, options: Options, *, trials: int | None = None, beside: int = 1) -> list[Line]:
    """The lines of a row: one a seed, or one that says why the method refuses the task. Runs that are stopped go on
    from their checkpoints. `beside` is noted: how many rows are computed on the machine at once."""
    once, here = name in ONCE, options.out / "runs" / arena.name / name
    rounds = 1 if once else arena.rounds
    who, trials = {"federation": arena.name, "method": name}, trials or (QUICK_TRIALS if options.quick else TRIALS)
    try:
        result = compare(
            {name: methods(arena)[name]}, partial(arena.setting, quick=options.quick), seeds=options.seeds,
            tune=trials, rounds=rounds, cohort=None if once else arena.cohort,
            evaluate_every=rounds, engine=arena.engine, out=Storage(here, checkpoint_every=max(1, rounds // 2)),
            measure=worst, resume=True, progress=False,
        )  # fmt: skip
    except (ConfigError, TaskError) as error:
        return [{**who, "refused": str(error)}]
    values = {score["metric"]: score["values"] for score in result.scores}
    chosen = result.tuning[0]["chosen"]
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() and arena.gpu else "CPU"
    facts = {"rounds": rounds, "trials": trials, "settings": chosen, "machine": machine, "beside": beside}
    return [
        {**who, "seed": seed, **{metric: found[seed] for metric, found in values.items()}, **facts}
        for seed in range(options.seeds)
    ]


def write(lines: Iterable[Line], options: Options) -> None:
    """Append lines in one piece, and remove the row's runs."""
    lines = list(lines)
    options.out.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    file = os.open(options.out / RESULTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(file, data)
    finally:
        os.close(file)
    shutil.rmtree(options.out / "runs" / lines[0]["federation"] / lines[0]["method"], ignore_errors=True)


def read(out: Path) -> list[Line]:
    """All lines so far; of a row that was computed twice, the last ones."""
    path, found = out / RESULTS, dict[tuple[str, str, Any], Line]()
    for text in path.read_text().splitlines() if path.exists() else ():
        line = json.loads(text)
        found[line["federation"], line["method"], line.get("seed")] = line
    return list(found.values())


def missing(options: Options) -> list[tuple[Arena, str]]:
    """The rows that have no line."""
    done = {(line["federation"], line["method"]) for line in read(options.out)}
    return [(arena, name) for arena, name in rows(options.quick) if (arena.name, name) not in done]


def scores(lines: Sequence[Line], metric: str, kind: str) -> list[float]:
    """The finite scores of a method's lines: of the mean weights, or with the kind `MARGINAL` of the posterior average.
    What only simulated clients send does not count."""
    if metric == "MB sent" and lines[0]["method"] in SILENT:
        return []
    shared = metric in ("MB sent", "seconds")
    found = (line.get(metric if shared else metric + kind) for line in lines)
    return [float(value) for value in found if value is not None and math.isfinite(value)]


def table(lines: Sequence[Line], arena: Arena) -> list[tuple[str, list[list[float]]]]:
    """(method, its finite scores over seeds by metric), the best accuracy first, without methods that refused. A
    posterior average has its own row."""
    mine = [line for line in lines if line["federation"] == arena.name and "refused" not in line]
    found = []
    for name in dict.fromkeys(line["method"] for line in mine):
        own = [line for line in mine if line["method"] == name]
        for shown, kind in ((name, ""), (f"{name}, average", MARGINAL)):
            cells = [scores(own, metric, kind) for metric in METRICS]
            if cells[0]:
                found.append((shown, cells))
    return sorted(found, key=lambda row: -_mean(row[1][0]))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else -math.inf


def markdown(lines: Sequence[Line]) -> str:
    """The tables of all federations."""
    parts = []
    for arena in ARENAS:
        found = table(lines, arena)
        if not found:
            continue
        first = dict(found).get("FedAvg", [[], []])[1]
        parts += [f"## {arena.title}\n", f"| method | {' | '.join(HEADS)} |", "|---" * (len(HEADS) + 1) + "|"]
        for name, cells in found:
            shown = [*map(_cell, METRICS, cells)]
            parts.append(f"| {name} | {' | '.join([*shown[:2], _paired(cells[1], first), *shown[2:]])} |")
        refused = [line for line in lines if line["federation"] == arena.name and "refused" in line]
        parts += ["", *(f"- {line['method']}: {line['refused']}" for line in refused), ""]
    return "\n".join(parts)


def _cell(metric: str, values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean, deviation = spread(list(values))
    if metric in ("MB sent", "seconds"):
        return f"{mean:.3g}"
    return f"{mean:.3f}" + ("" if deviation is None else f" ± {deviation:.3f}")


def _paired(values: Sequence[float], first: Sequence[float]) -> str:
    """The mean difference to FedAvg's NLL, and the number of seeds in which it is lower."""
    if len(values) != len(first) or not first:
        return "–"
    apart = [a - b for a, b in zip(values, first, strict=True)]
    mean = f"{sum(apart) / len(apart):+.3f}".replace("-", "−")
    return f"{mean} ({sum(d < 0 for d in apart)} of {len(apart)})"


def figures(lines: Sequence[Line]) -> list[Panels]:
    """Accuracy by megabytes and NLL by seconds, for every federation. Named are FedAvg and the methods that no other
    one beats in both."""
    found = []
    for arena in ARENAS:
        cells = {name: [_mean(values) for values in each] for name, each in table(lines, arena)}
        plots = [("accuracy", "MB sent", 0, 4, -1), ("nll", "seconds", 1, 5, 1)]
        panels = []
        for up, along, y, x, way in plots:
            points = {name: (means[x], means[y]) for name, means in cells.items() if means[x] > 0}
            costs = {name: (across, way * high) for name, (across, high) in points.items()}
            named = {"FedAvg", *unbeaten(costs)}
            marks = [Mark(name, *point, named=name in named) for name, point in points.items()]
            panels.append(Panel(f"{up} by {along}", marks=marks, x_label=along, log_x=True, y_label=up))
        if cells:
            found.append(Panels(arena.title, "Means over seeds.", panels))
    return found


def unbeaten(costs: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names whose two costs no other one has as low, and one of them lower."""
    return [
        name
        for name, (a, b) in costs.items()
        if not any(x <= a and y <= b and (x, y) != (a, b) for x, y in costs.values())
    ]


def save_plots(drawn: Sequence[Panels], names: Sequence[str], out: Path) -> None:
    """The figures as SVG files."""
    from consilience.report.drawing.panels import side_by_side  # Matplotlib is slow to import
    from consilience.report.figure import Figure

    for panels in drawn:
        name = next(arena.name for arena in ARENAS if arena.title == panels.title)
        Figure(panels.title, (side_by_side(panels, names),)).save(out / f"leaderboard-{name}.svg")


def page(options: Options, start: float) -> Comparison:
    """Write the tables, plots and report from the lines that there are."""
    lines, found = read(options.out), list[Row]()
    for arena in ARENAS:
        for name, cells in table(lines, arena):
            suffix = f", {arena.title}"
            found += [
                Row(name, f"{metric}{suffix}", *spread(values), len(values))
                for metric, values in zip(METRICS, cells, strict=True)
                if values
            ]
    drawn = figures(lines)
    (options.out / "leaderboard.md").write_text(markdown(lines))
    save_plots(drawn, list(dict.fromkeys(row.method for row in found)), options.out)
    trials = max((line.get("trials", 1) for line in lines), default=1)
    text = TEXT.format(trials=plural(trials, "trial"))
    return finished("leaderboard", TITLE, text, options, found, drawn, start)


def run(options: Options) -> Comparison:
    """All rows that are missing, one after another."""
    start = time.perf_counter()
    for arena, name in missing(options):
        options.tell(f"{arena.title}: {name}", 0)
        write(compute(arena, name, options), options)
    return page(options, start)


TITLE = "Leaderboard: every method on four federations"
RECIPE = Recipe("leaderboard", TITLE, run)
