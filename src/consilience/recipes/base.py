"""Recipes: named experiments that write a table, figures and a report."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from consilience.algorithms.switch import Method
from consilience.data.dataset import Dataset
from consilience.figures import Panels, Pictures
from consilience.metrics import spread
from consilience.runs.directory import Storage
from consilience.studies import Setting, compare
from consilience.studies.comparison import Comparison, Row

T = TypeVar("T")

Scores = Mapping[tuple[str, str], Sequence[float]]
"""Scores over seeds, by (method, metric)."""


@dataclass(frozen=True)
class Options:
    """The size of a recipe, the number of seeds, and the folder to write to."""

    quick: bool
    seeds: int
    out: Path
    resume: bool = False
    announce: Callable[[str, int], None] | None = None

    def command(self, name: str) -> str:
        return f"consilience reproduce {name}" + (" --quick" if self.quick else "")

    def tell(self, method: str, seed: int) -> None:
        """Announce the next run to the user."""
        if self.announce is not None:
            self.announce(method, seed)


@dataclass(frozen=True)
class Recipe:
    """A named experiment; `seeds` is the default number for the full size and `quick_seeds` for the small one."""

    name: str
    title: str
    run: Callable[[Options], Comparison]
    seeds: int = 3
    quick_seeds: int = 1


def compared(
    name: str,
    title: str,
    text: str,
    options: Options,
    methods: Mapping[str, Method],
    setting: Callable[[int], Setting],
    checkpoint_every: int = 10,
    **others: Any,
) -> Comparison:
    """Run a recipe that is one comparison; `others` are options of `compare` and `fit`."""
    return compare(
        methods, setting, seeds=options.seeds, out=Storage(options.out, checkpoint_every=checkpoint_every),
        title=title, text=text, command=options.command(name), resume=options.resume, on_run=options.announce,
        progress=False, **others,
    )  # fmt: skip


def finished(
    name: str,
    title: str,
    text: str,
    options: Options,
    rows: list[Row],
    figures: Sequence[Panels | Pictures],
    start: float,
    **others: Any,
) -> Comparison:
    """Save a recipe's table and figures as a comparison; `start` is when it began (time.perf_counter)."""
    seconds = time.perf_counter() - start
    result = Comparison(title, text, options.command(name), seconds, rows, figures=figures, **others)
    result.save(options.out)
    return result


def rows_of(scores: Scores, paper: Mapping[tuple[str, str], float] | None = None) -> list[Row]:
    """A row for each (method, metric), with the mean and standard deviation of its scores and a paper's figure."""
    published = paper or {}
    return [Row(*key, *spread(list(values)), len(values), published.get(key)) for key, values in scores.items()]


def published(figures: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, str], float]:
    """A paper's figures by (method, metric), from figures by method."""
    return {(method, metric): value for method, metrics in figures.items() for metric, value in metrics.items()}


def seeded(seed: int, make: Callable[[], T]) -> T:
    """What `make` returns, with the initial weights of a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def about(data: Dataset, count: int) -> Dataset:
    """About `count` examples, evenly spaced."""
    return data[:: max(1, len(data) // count)]
