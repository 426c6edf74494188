"""What a recipe is: a named experiment that anyone can run again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from consilience.comparison import Comparison, Row
from consilience.report.panels import Panels


@dataclass(frozen=True)
class Options:
    """How to run a recipe: at its small size or the full one, over how many seeds, and where to write."""

    quick: bool
    seeds: int
    out: Path
    resume: bool = False
    announce: Callable[[str, int], None] | None = None


@dataclass(frozen=True)
class Recipe:
    """`run` does the work; `seeds` is the default number for the full size and `quick_seeds` for the small one."""

    name: str
    title: str
    run: Callable[[Options], Comparison]
    seeds: int = 3
    quick_seeds: int = 1


def finished(
    name: str, title: str, text: str, options: Options, rows: list[Row], figures: list[Panels], start: float
) -> Comparison:
    """A recipe's table and figures as a comparison, saved; `start` is when it began (time.perf_counter)."""
    command = f"consilience reproduce {name}" + (" --quick" if options.quick else "")
    result = Comparison(title, text, command, time.perf_counter() - start, rows, figures=figures)
    result.save(options.out)
    return result
