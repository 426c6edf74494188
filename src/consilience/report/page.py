"""A page is a list of sections, a section a list of plain blocks; the template knows nothing of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from consilience.figures.pictures import Pictures
from consilience.report.figures import DARK, LIGHT


@dataclass(frozen=True)
class Plot:
    """An SVG figure and what it shows."""

    svg: str
    caption: str
    wide: bool = False

    @property
    def markup(self) -> Markup:
        """The figure, not escaped: we drew it, and matplotlib escaped the text in it."""
        return Markup(self.svg)


@dataclass(frozen=True)
class Cell:
    """A table cell: `sort` is what a click on the head sorts by, `swatch` the colour of a method."""

    text: str
    spread: str = ""
    sort: float | str | None = None
    best: bool = False
    href: str = ""
    swatch: str = ""
    quiet: bool = False

    @property
    def key(self) -> float | str:
        """What to sort by: a number if there is one, else the text."""
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
    """One number large enough for the last row of a lecture room."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Key:
    """An entry of a legend: its colour is a CSS variable of the page, s0 to s7 (series) or k0 to k3 (classes); its
    style that of a line, or "dot"."""

    label: str
    colour: str
    style: str = "solid"


@dataclass(frozen=True)
class Link:
    """A way to another page, relative to this one."""

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
        """Whether there is anything under the heading."""
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
    up: Link | None = None


def render(page: Page) -> str:
    """The page as HTML; whatever comes from data is escaped."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    template = files(__package__).joinpath("template.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(page=page, light=LIGHT, dark=DARK)
