"""What a recipe is: a named experiment that anyone can run again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from consilience.comparison import Comparison


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
