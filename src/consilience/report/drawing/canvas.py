"""Colours, style, and drawings as SVG elements or files.

In a page, colours are CSS variables, so one SVG serves light and dark pages. Text stays text: it takes the page's font
and can be searched and copied. A file has the colours of a light page.
"""

import html
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import get_named_colors_mapping
from matplotlib.figure import Figure

LIGHT = {
    "paper": "#ffffff", "ink": "#17202a", "muted": "#5b6671", "grid": "#e2e6ea", "panel": "#f5f7f9", "link": "#0a5c9e",
    "s0": "#0072b2", "s1": "#d55e00", "s2": "#009e73", "s3": "#b8578f",
    "s4": "#e69f00", "s5": "#17202a", "s6": "#46a6de", "s7": "#9a8c00",
    "k0": "#2b7bba", "k1": "#9cc6e4", "k2": "#7d8a96", "k3": "#c9d0d6",
}  # fmt: skip
DARK = {
    "paper": "#13171b", "ink": "#e9edf0", "muted": "#9ba6b0", "grid": "#2d343b", "panel": "#1b2025", "link": "#74b8ec",
    "s0": "#4aa3df", "s1": "#f5874b", "s2": "#2fc79a", "s3": "#e29ac4",
    "s4": "#f3b23c", "s5": "#e9edf0", "s6": "#92d2f8", "s7": "#d9cd4a",
    "k0": "#2b7bba", "k1": "#8fc1e6", "k2": "#78858f", "k3": "#47525c",
}  # fmt: skip
# Matplotlib knows no CSS variables: each variable has an otherwise unused colour, which is replaced in the SVG.
PLACEHOLDERS = {name: f"#0102{index:02x}" for index, name in enumerate(LIGHT)}
CSS = {colour: f"var(--{name})" for name, colour in PLACEHOLDERS.items()}


def named(colour: str) -> str:
    """Matplotlib's name for one of our colours; its value is that of the drawing at hand."""
    return f"consilience:{colour}"


INK, MUTED, GRID, PAPER = (named(colour) for colour in ("ink", "muted", "grid", "paper"))
SERIES = tuple(named(f"s{i}") for i in range(8))
SHADES = tuple(named(f"k{i}") for i in range(4))
DASHED: Any = (0, (3, 2))
WIDTH = 3.9  # inches of a usual drawing
FEW = 12  # points that are drawn as dots, clients that fit into a usual drawing
NAME = 22  # characters of a name beside an axis
# No mathematics in text: a client may be called "$x".
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True, "axes.edgecolor": GRID, "axes.grid": True, "axes.labelcolor": MUTED,
    "axes.spines.right": False, "axes.spines.top": False, "axes.titlelocation": "left", "axes.titlesize": 10,
    "axes.titleweight": "bold", "font.size": 9.5, "grid.color": GRID, "grid.linewidth": 0.8, "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round", "pdf.fonttype": 42, "svg.fonttype": "none", "text.color": INK,
    "text.parse_math": False, "xtick.color": GRID, "xtick.labelcolor": MUTED, "ytick.color": GRID,
    "ytick.labelcolor": MUTED, "ytick.left": False,
}  # fmt: skip


def series(index: int) -> str:
    """The colour of the series `index`; after eight series the colours repeat."""
    return SERIES[index % len(SERIES)]


def swatch(index: int) -> str:
    """The CSS variable of the same colour."""
    return f"s{index % len(SERIES)}"


@dataclass(frozen=True)
class Drawing:
    """A title, a size in inches, and a function that paints a matplotlib figure."""

    title: str
    size: tuple[float, float]
    paint: Callable[[Figure], None]

    def element(self, salt: str) -> str:
        """An SVG element for a page, as wide as the page lets it be. Ids are hashed with `salt`, which must differ
        between the drawings of a page."""
        svg = _element(self._save("svg", PLACEHOLDERS, salt), self.title)
        return re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', "", svg, count=1)

    def file(self, kind: str) -> bytes:
        """An "svg", "png" or "pdf" file in the colours of a light page."""
        found = self._save(kind, LIGHT, self.title)
        if kind != "svg":
            return found
        style = "font-family: system-ui, 'Segoe UI', Arial, sans-serif; stroke-linejoin: round; max-width: 100%"
        return _element(found, self.title).replace("<svg", f'<svg style="{style}"', 1).encode()

    def _save(self, kind: str, colours: Mapping[str, str], salt: str) -> bytes:
        with _palette(colours), mpl.rc_context({**STYLE, "svg.hashsalt": salt}), warnings.catch_warnings():
            # The browser has fonts for scripts that the layout font lacks.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            figure = Figure(figsize=self.size, layout="constrained", facecolor=PAPER)
            self.paint(figure)
            out = io.BytesIO()
            undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
            figure.savefig(out, format=kind, transparent=colours is PLACEHOLDERS, dpi=200, metadata=undated)
        return out.getvalue()


def chart(title: str, size: tuple[float, float], paint: Callable[[Axes], None]) -> Drawing:
    """A drawing of one pair of axes under its title."""

    def whole(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set_title(title)
        paint(axes)

    return Drawing(title, size, whole)


@contextmanager
def _palette(colours: Mapping[str, str]) -> Iterator[None]:
    """Give our named colours these values while a figure is painted and saved."""
    known = get_named_colors_mapping()
    try:
        for name, value in colours.items():  # not update(), which would leave old values in matplotlib's cache
            known[named(name)] = value
        yield
    finally:
        for name in colours:
            known.pop(named(name), None)


def _element(file: bytes, title: str) -> str:
    """The SVG element of a saved file, with its title for screen readers."""
    svg = file.decode()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # Tags only: a client may be called "font-family", and its name must not change.
    svg = re.sub(r"<[^<>]*>", lambda tag: _tidy(tag[0]), svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1).strip()


def _tidy(tag: str) -> str:
    """A tag without fonts, group ids and the sixth decimal, and with CSS variables as colours."""
    tag = re.sub(r'^<g id="[^"]*"', "<g", tag)
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    tag = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]).replace(" \n", " "), tag)
    return re.sub(r"#0[0-9a-f]{5}\b", lambda colour: CSS.get(colour[0], colour[0]), tag)
