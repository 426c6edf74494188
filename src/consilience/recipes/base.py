"""What a recipe is: a named experiment that anyone can run again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilience.algorithms.switch import Method
from consilience.figures.panels import Panels
from consilience.figures.pictures import Pictures
from consilience.runs.directory import Storage
from consilience.studies.compare import Comparison, Row, Setting, compare


@dataclass(frozen=True)
class Options:
    """How to run a recipe: at its small size or the full one, over how many seeds, and where to write."""

    quick: bool
    seeds: int
    out: Path
    resume: bool = False
    announce: Callable[[str, int], None] | None = None

    def command(self, name: str) -> str:
        """What was typed."""
        return f"consilience reproduce {name}" + (" --quick" if self.quick else "")


@dataclass(frozen=True)
class Recipe:
    """`run` does the work; `seeds` is the default number for the full size and `quick_seeds` for the small one."""

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
    """A recipe that is one comparison; `others` are options of `compare` and `fit`."""
    return compare(
        methods,
        setting,
        seeds=options.seeds,
        out=Storage(options.out, checkpoint_every=checkpoint_every),
        title=title,
        text=text,
        command=options.command(name),
        resume=options.resume,
        on_run=options.announce,
        progress=False,
        **others,
    )


def finished(
    name: str,
    title: str,
    text: str,
    options: Options,
    rows: list[Row],
    figures: Sequence[Panels | Pictures],
    start: float,
) -> Comparison:
    """A recipe's table and figures as a comparison, saved; `start` is when it began (time.perf_counter)."""
    result = Comparison(title, text, options.command(name), time.perf_counter() - start, rows, figures=figures)
    result.save(options.out)
    return result
