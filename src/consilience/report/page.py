"""Pages of sections of plain blocks, and their HTML. The template knows nothing of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import count
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from consilience.core import text
from consilience.figures.pictures import Pictures
from consilience.report.drawing.canvas import DARK, LIGHT, Drawing


@dataclass(frozen=True)
class Plot:
    """A drawing and its caption. A `wide` one has a row of its own, and a phone scrolls it unless it is `whole`."""

    drawing: Drawing
    caption: str
    wide: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Cell:
    """A table cell: a click on the head sorts by `sort` (the text if None); `swatch` is the colour of a method."""

    text: str
    spread: str = ""
    sort: float | str | None = None
    best: bool = False
    href: str = ""
    swatch: str = ""
    quiet: bool = False

    @classmethod
    def of(cls, value: Any, places: int, **options: Any) -> Cell:
        """A number with `places` decimals; a dash, sorted last, if it is none."""
        return cls(text.fixed(value, places), sort=value if text.is_number(value) else "", **options)

    @property
    def key(self) -> float | str:
        return self.text if self.sort is None else self.sort


@dataclass(frozen=True)
class Table:
    """Rows under a head; the first column is text, the others are numbers unless `prose`."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    prose: bool = False


@dataclass(frozen=True)
class Tile:
    """One large number with its label."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Key:
    """An entry of a legend. Its colour is a CSS variable: s0 to s7 for series, k0 to k3 for classes. Its style is a
    line's, or "dot"."""

    label: str
    colour: str
    style: str = "solid"


@dataclass(frozen=True)
class Link:
    """A link to another page, relative to this one."""

    label: str
    href: str


@dataclass(frozen=True)
class Section:
    """A heading with some blocks, in the order of the fields. A section without blocks is not shown."""

    title: str
    text: str = ""
    facts: Sequence[tuple[str, str]] = ()
    legend: Sequence[Key] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Pictures] = ()
    plots: Sequence[Plot] = ()
    folded: Sequence[tuple[str, str | Table]] = ()

    @property
    def shown(self) -> bool:
        return bool(self.facts or self.tables or self.pictures or self.plots or self.folded)


@dataclass(frozen=True)
class Page:
    """A whole report."""

    kicker: str
    title: str
    lead: str
    tiles: Sequence[Tile]
    tiles_caption: str
    sections: Sequence[Section]
    footer: str
    command: str = ""
    finding: str = ""
    up: Link | None = None
    refresh: int = 0
    """Seconds after which a browser loads the page again; 0 for never."""


def render(page: Page) -> str:
    """The page as HTML; all text is escaped."""
    numbers = count()

    def element(plot: Plot) -> Markup:
        """The SVG, not escaped: matplotlib escaped the text in it."""
        return Markup(plot.drawing.element(f"drawing {next(numbers)}"))

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    template = files(__package__).joinpath("template.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(page=page, light=LIGHT, dark=DARK, element=element)
